# SPDX-License-Identifier: BSD-3-Clause
"""The rows of the CUDA benchmark: shapes, where their keys lie, and the bytes they must move."""

import math
from dataclasses import dataclass, replace

import torch

from ..harness.shapes import DTYPES, log_uniform_lengths

OURS = "lean_decode"

K, M = 1 << 10, 1 << 20
CONTEXT, HEADS, RAGGED, UNIFORM = "context", "heads", "ragged", "uniform twin"
CAPACITY, QUERIES, WINDOW, PAGES = "capacity", "queries", "window", "pages"
PAPERS, EIGHT_BITS, LATENT = "papers", "8 bits", "latent"


@dataclass(frozen=True)
class CudaCase:
    """One row. Queries are the last of each sequence and causal among themselves.

    Layouts: HND `[batch, heads, slots, dim]`, NHD `[batch, slots, heads, dim]`, packed: the keys of
    one sequence after those of the one before, `[all keys, heads, dim]`. Pages are NHD.
    """

    section: str = CONTEXT
    dtype: str = "bf16"
    kv_dtype: str = ""  # of keys and values where it is not `dtype`: those of caches
    heads: tuple[int, int] = (32, 8)  # query, key/value
    head_dim: int = 128
    latent_dim: int = 0  # the values are so many first columns of the keys; 0: they are their own
    lengths: tuple[int, ...] = (K,)  # keys of each sequence of the batch
    seqlen_q: int = 1
    capacity: int = 0  # slots of each sequence; 0: the longest length
    window: int = 0  # keys that a query sees, itself included; 0: all
    page_size: int = 0
    layout: str = "HND"
    flex: bool = False  # compiling for it takes several seconds

    def __post_init__(self) -> None:
        if self.layout == "packed" and len(set(self.lengths[:-1])) > 1:
            # One batch stride has to fit all sequences.
            raise ValueError(f"{self.name}: packed sequences but the last must have one length")

    @property
    def name(self) -> str:
        dim = f"d{self.head_dim}" + (f"/{self.latent_dim}" if self.latent_dim else "")
        heads = f"{self.heads[0]}/{self.heads[1]} {dim}"
        dtype = f"{self.dtype}/{self.kv_dtype}" if self.kv_dtype else self.dtype
        parts = [f"{dtype} {heads} B={self.batch} {self._keys()}"]
        parts += [f"of {thousands(self.slots)}"] if self.slots > max(self.lengths) else []
        parts += [f"q={self.seqlen_q}"] if self.seqlen_q > 1 else []
        parts += [f"window {thousands(self.window)}"] if self.window else []
        parts += [f"page {self.page_size}"] if self.page_size else []
        parts += [self.layout] if self.layout != "HND" else []
        return " ".join(parts)

    def _keys(self) -> str:
        if not self.ragged:
            return thousands(self.lengths[0])
        if self.layout == "packed":
            return f"{self.batch - 1}x{thousands(self.lengths[0])}+{thousands(self.lengths[-1])}"
        return f"ragged {thousands(min(self.lengths))}-{thousands(max(self.lengths))}"

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def ragged(self) -> bool:
        return len(set(self.lengths)) > 1

    @property
    def slots(self) -> int:
        return self.capacity or max(self.lengths)

    @property
    def lengths_on_device(self) -> bool:
        """The host is not to know the lengths, as in a captured graph."""
        return self.ragged or self.slots > max(self.lengths) or self.page_size > 0

    def first_key(self, length: int) -> int:
        """The first key of a sequence that any query sees."""
        return max(0, length - self.seqlen_q + 1 - self.window) if self.window else 0

    @property
    def num_keys(self) -> int:
        """Keys that a query of their sequence sees."""
        return sum(length - self.first_key(length) for length in self.lengths)

    @property
    def cached_dtype(self) -> torch.dtype:
        """Dtype of keys and values."""
        return DTYPES[self.kv_dtype or self.dtype]

    @property
    def token_bytes(self) -> int:
        """Size in bytes of the keys, values and scales of one token over all heads."""
        columns = self.head_dim * (1 if self.latent_dim else 2)
        scales = 2 * 4 if self.kv_dtype else 0
        return self.heads[1] * (self.cached_dtype.itemsize * columns + scales)

    @property
    def read_bytes(self) -> int:
        """Size in bytes of the keys and values that the ranges cover."""
        return self.token_bytes * self.num_keys

    @property
    def io_bytes(self) -> int:
        """Bytes that every implementation must move once: `read_bytes`, q and o."""
        rows = self.batch * self.heads[0] * self.seqlen_q
        columns = self.head_dim + (self.latent_dim or self.head_dim)
        return self.read_bytes + DTYPES[self.dtype].itemsize * columns * rows

    @property
    def num_pages(self) -> int:
        """Number of pages of each sequence."""
        return -(-self.slots // self.page_size)

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """Shape of the memory of K, or of V, in the layout's order of axes."""
        heads, dim = self.heads[1], self.head_dim
        if self.page_size:
            return self.batch * self.num_pages, self.page_size, heads, dim
        if self.layout == "packed":
            return sum(self.lengths), heads, dim
        if self.layout == "NHD":
            return self.batch, self.slots, heads, dim
        return self.batch, heads, self.slots, dim

    @property
    def set_bytes(self) -> int:
        """Size in bytes of the memory of K and V together, with their scales."""
        return self.token_bytes * (math.prod(self.tensor_shape[:-1]) // self.heads[1])


def thousands(n: int) -> str:
    """1024 as 1k, 1048576 as 1M, anything else as it is."""
    if n >= M and n % M == 0:
        return f"{n // M}M"
    return f"{n // K}k" if n >= K and n % K == 0 else str(n)


def uniform_twin(case: CudaCase) -> CudaCase:
    """As many bytes as a ragged case's, in sequences of one length (rounded up by < 1 key)."""
    length = -(-sum(case.lengths) // case.batch)
    return replace(
        case, section=UNIFORM, lengths=(length,) * case.batch, capacity=0, layout="NHD", flex=False
    )


ONE_LONG = CudaCase(RAGGED, lengths=(K,) * 63 + (M,), layout="packed")
LOG_UNIFORM = CudaCase(RAGGED, lengths=log_uniform_lengths(64, 512, 64 * K), layout="NHD")
LOG_UNIFORM_8 = CudaCase(
    RAGGED, lengths=log_uniform_lengths(8, 512, 256 * K), layout="NHD", flex=True
)
LATENCY = CudaCase(lengths=(K,))
ONE_HEAD = CudaCase(HEADS, heads=(8, 1), lengths=(128 * K,))
MANY_ROWS = CudaCase(QUERIES, lengths=(64 * K,), seqlen_q=16)
# What latent attention (MLA) makes of DeepSeek-V3's heads, and of the 16 of V2-Lite.
MLA = CudaCase(LATENT, heads=(128, 1), head_dim=576, latent_dim=512, lengths=(64 * K,))
MLA_16 = replace(MLA, heads=(16, 1))
LATENTS = [
    replace(mla, lengths=lengths, page_size=page_size)
    for mla in (MLA_16, MLA)
    for lengths, page_size in (((64 * K,), 0), ((8 * K,) * 8, 0), ((8 * K,) * 8, 64))
]


def quick_cases() -> list[CudaCase]:
    """Each target by one or two rows, in the order of what they are worth, nothing that is compiled
    first: about a minute on the GPU. What lost the device once is the last."""
    return [
        LATENCY,
        ONE_HEAD,
        MLA_16,
        CudaCase(lengths=(16 * K,)),
        CudaCase(lengths=(64 * K,)),
        MANY_ROWS,
        CudaCase(lengths=(8 * K,) * 8),
        CudaCase(lengths=(M,)),
        CudaCase(HEADS, head_dim=64, lengths=(64 * K,)),
        ONE_LONG,
        CudaCase(CAPACITY, lengths=(K,) * 8, capacity=64 * K, layout="NHD"),
        CudaCase(QUERIES, lengths=(16 * K,) * 8, seqlen_q=4),
        CudaCase(WINDOW, lengths=(64 * K,) * 8, window=4 * K),
        CudaCase(PAGES, lengths=(16 * K,) * 8, page_size=16),
        CudaCase(EIGHT_BITS, kv_dtype="int8", lengths=(64 * K,)),
        CudaCase(PAPERS, heads=(56, 56), head_dim=64, lengths=(64 * K,)),
        uniform_twin(ONE_LONG),
    ]


def paper_cases() -> list[CudaCase]:
    """LeanAttention's (arXiv:2405.10480, section V): heads without groups, by context."""
    contexts = [n * K for n in (1, 4, 16, 64, 256, 512)]
    shapes = [((n, n), 64, 1) for n in (56, 24, 16, 64)]
    shapes += [((24, 24), 64, 4), ((24, 24), 128, 1)]
    return [
        CudaCase(PAPERS, heads=heads, head_dim=head_dim, lengths=(keys,) * batch)
        for heads, head_dim, batch in shapes
        for keys in contexts
    ]


def standard_cases() -> list[CudaCase]:
    """The shapes that this library is about, those with a target of their own first."""
    cases = quick_cases()
    cases += [CudaCase(lengths=(n,)) for n in (4 * K, 256 * K)]
    cases += [CudaCase(lengths=(n,) * 8) for n in (K, 32 * K, 64 * K)]
    cases += [CudaCase(lengths=(n,) * 32) for n in (K, 16 * K)]
    cases += [CudaCase(lengths=(n,) * 64) for n in (K, 8 * K, 64 * K)]
    cases += [LOG_UNIFORM, uniform_twin(LOG_UNIFORM), LOG_UNIFORM_8, uniform_twin(LOG_UNIFORM_8)]
    cases += [CudaCase(CAPACITY, lengths=(4 * K,), capacity=256 * K, layout="NHD")]
    cases += [CudaCase(QUERIES, lengths=(16 * K,) * 8, seqlen_q=n) for n in (2, 8, 16)]
    cases += [CudaCase(QUERIES, heads=(64, 8), lengths=(16 * K,) * 8, seqlen_q=n) for n in (4, 16)]
    cases += [replace(MANY_ROWS, head_dim=64)]
    cases += [CudaCase(PAGES, lengths=(16 * K,) * 8, page_size=n) for n in (1, 64, 256)]
    cases += [CudaCase(WINDOW, lengths=(128 * K,), window=K)]
    for heads in ((32, 4), (32, 32), (64, 8)):
        cases += [CudaCase(HEADS, heads=heads, lengths=(n,)) for n in (4 * K, 64 * K)]
    cases += [CudaCase(HEADS, heads=(8, 1), lengths=(n,)) for n in (4 * K, M)]
    cases += [CudaCase(HEADS, heads=heads, lengths=(4 * K,) * 64) for heads in ((32, 4), (8, 1))]
    cases += [CudaCase(HEADS, heads=heads, lengths=(8 * K,) * 8) for heads in ((32, 32), (64, 8))]
    cases += [CudaCase(HEADS, head_dim=64, lengths=lengths) for lengths in ((K,), (8 * K,) * 64)]
    cases += [CudaCase(HEADS, heads=(32, 32), head_dim=64, lengths=(8 * K,) * 8)]
    cases += [CudaCase(HEADS, dtype=dtype, lengths=(64 * K,)) for dtype in ("fp16", "fp32")]
    cases += [CudaCase(HEADS, heads=(8, 1), lengths=(64 * K,) * 8, flex=True)]
    cases += [CudaCase(EIGHT_BITS, kv_dtype="fp8", lengths=(64 * K,))]
    for kv_dtype in ("int8", "fp8"):
        cases += [CudaCase(EIGHT_BITS, kv_dtype=kv_dtype, lengths=(8 * K,) * 8)]
        cases += [CudaCase(EIGHT_BITS, kv_dtype=kv_dtype, lengths=(16 * K,) * 8, page_size=16)]
    return _once([*cases, *LATENTS, *paper_cases()])


def full_cases() -> list[CudaCase]:
    """The whole product of batch, context, heads and head_dim as well: minutes."""
    cases = standard_cases()
    for head_dim in (128, 64):
        for heads in ((32, 8), (32, 4), (32, 32), (64, 8), (8, 1)):
            for batch in (1, 8, 32, 64):
                for keys in (K, 4 * K, 16 * K, 64 * K, 256 * K, M):
                    cases.append(CudaCase(heads=heads, head_dim=head_dim, lengths=(keys,) * batch))
    cases += [CudaCase(QUERIES, lengths=(64 * K,), seqlen_q=n) for n in range(2, 17)]
    return _once(cases)


def _once(cases: list[CudaCase]) -> list[CudaCase]:
    """The first of each name."""
    first: dict[str, CudaCase] = {}
    for case in cases:
        first.setdefault(case.name, case)
    return list(first.values())
