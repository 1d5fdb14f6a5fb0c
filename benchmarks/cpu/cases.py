# SPDX-License-Identifier: BSD-3-Clause
"""The rows of `decode.py` on the CPU, and their inputs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tree_attention import _C
from tree_attention.reference import quantise

from ..harness.measure import InputArena
from ..harness.shapes import DTYPES, log_uniform_lengths

KV_DTYPES = {"int8": torch.int8, "float8": torch.float8_e4m3fn}


@dataclass(frozen=True)
class DecodeCase:
    """One row. Queries are the last of each sequence and causal among themselves."""

    dtype: str = "bf16"
    heads: tuple[int, int] = (32, 8)  # query, key/value
    head_dim: int = 128
    lengths: tuple[int, ...] = (32768,)  # keys of each sequence of the batch
    seqlen_q: int = 1
    page_size: int = 0  # keys in a page of a shuffled page table; 0: contiguous keys
    instruction_set: str = ""  # the widest that the machine has, unless named
    warm: bool = False
    flex: bool = False  # compiling for it takes several seconds
    kv_dtype: str = ""  # of keys and values, if they have 8 bits and scales
    value_dim: int = 0  # columns of a value, where not those of a key
    contiguous: bool = False  # beside pages, the same call on contiguous keys is timed

    @property
    def name(self) -> str:
        ragged = len(set(self.lengths)) > 1
        keys = f"{min(self.lengths)}-{max(self.lengths)}" if ragged else str(self.lengths[0])
        columns = f"{self.head_dim}/{self.value_dim}" if self.value_dim else self.head_dim
        parts = [f"{self.dtype} {self.heads[0]}/{self.heads[1]} d{columns}"]
        parts += [f"keys {self.kv_dtype}"] if self.kv_dtype else []
        parts += [f"B={len(self.lengths)}{' ragged' if ragged else ''} {keys}"]
        parts += [f"q={self.seqlen_q}"] if self.seqlen_q > 1 else []
        parts += [f"pages of {self.page_size}"] if self.page_size else []
        parts += [self.instruction_set] if self.instruction_set else []
        return " ".join(parts + (["warm"] if self.warm else []))

    @property
    def kv_shape(self) -> tuple[int, int, int, int]:
        outer, slots = len(self.lengths), max(self.lengths)
        if self.page_size:
            outer, slots = sum(pages_of(self.lengths, self.page_size)), self.page_size
        return outer, self.heads[1], slots, self.head_dim

    @property
    def value_shape(self) -> tuple[int, int, int, int]:
        return *self.kv_shape[:3], self.value_dim or self.head_dim

    @property
    def num_keys(self) -> int:
        return sum(self.lengths)

    @property
    def io_bytes(self) -> int:
        """K and V up to each length, q and o: what every implementation must move once."""
        size, rows = DTYPES[self.dtype].itemsize, len(self.lengths) * self.heads[0] * self.seqlen_q
        columns = self.head_dim + self.value_shape[3]  # of a key and a value, and of q and o
        pair_bytes = columns + 2 * 4 if self.kv_dtype else columns * size  # with both scales
        return self.heads[1] * self.num_keys * pair_bytes + size * columns * rows

    @property
    def operations(self) -> int:
        """Multiply-adds count two: q.k and p.v over the visible keys of every query."""
        visible = sum(
            max(0, length - self.seqlen_q + 1 + i)
            for length in self.lengths
            for i in range(self.seqlen_q)
        )
        return 2 * self.heads[0] * (self.head_dim + self.value_shape[3]) * visible


def pages_of(lengths: Sequence[int], page_size: int) -> list[int]:
    """Return the number of pages of each sequence."""
    return [-(-length // page_size) for length in lengths]


def quick_cases() -> list[DecodeCase]:
    """A second or two in all: for trying the program."""
    return [
        DecodeCase(lengths=(256,), warm=True),
        DecodeCase(dtype="fp32", heads=(4, 2), head_dim=64, lengths=(1024,), seqlen_q=3),
        DecodeCase(heads=(4, 2), head_dim=64, lengths=(1, 300, 777)),
        DecodeCase(heads=(4, 2), head_dim=64, lengths=(1, 300, 777), page_size=32),
        DecodeCase(kv_dtype="int8", heads=(4, 2), head_dim=64, lengths=(1, 300, 777), page_size=32),
        DecodeCase(kv_dtype="float8", heads=(4, 2), head_dim=64, lengths=(700,)),
    ]


def standard_cases() -> list[DecodeCase]:
    """The shapes that this library is about."""
    ragged = log_uniform_lengths(8, 512, 32768)
    return [
        DecodeCase(flex=True),
        DecodeCase(lengths=ragged),
        DecodeCase(heads=(8, 1), lengths=(65536,), flex=True),
        DecodeCase(heads=(32, 32), lengths=(16384,)),
        DecodeCase(dtype="fp32", flex=True),
        DecodeCase(dtype="fp16"),
        DecodeCase(lengths=(4096,) * 4),
        DecodeCase(dtype="fp32", lengths=(4096,) * 4),
        DecodeCase(seqlen_q=4),
        DecodeCase(seqlen_q=8),
        DecodeCase(lengths=(4096,), seqlen_q=512),
        DecodeCase(lengths=(4096,), seqlen_q=512, head_dim=64),
        DecodeCase(lengths=(2048,), seqlen_q=2048),
        DecodeCase(lengths=(2048,), seqlen_q=2048, head_dim=64),
        DecodeCase(lengths=(512,), warm=True),
        DecodeCase(lengths=(1,), warm=True),
        *(DecodeCase(page_size=n) for n in (128, 32, 16)),
        DecodeCase(lengths=ragged, page_size=128),
        *(DecodeCase(lengths=(4096,) * 32, page_size=n) for n in (128, 32, 16)),
        DecodeCase(head_dim=64),
        *eight_bit_cases(),
        *narrower_cases(),
    ]


def peer_cases() -> list[DecodeCase]:
    """The shapes that are compared with the kernels of `--peers`."""
    ragged = log_uniform_lengths(8, 512, 32768)
    return [
        DecodeCase(),
        DecodeCase(lengths=ragged),
        DecodeCase(heads=(8, 1), lengths=(65536,)),
        DecodeCase(heads=(32, 32), lengths=(16384,)),
        DecodeCase(head_dim=64),
        *(DecodeCase(page_size=n, contiguous=True) for n in (128, 32, 16)),
        DecodeCase(lengths=ragged, page_size=128, contiguous=True),
        DecodeCase(head_dim=64, page_size=128, contiguous=True),
        *(  # a part of a prompt, and what was read of it before
            DecodeCase(head_dim=d, lengths=(behind + n,), seqlen_q=n)
            for d in (128, 64)
            for behind, n in ((3584, 512), (0, 2048), (32768, 512), (32768, 2048))
        ),
        # Keys and values expanded from latents.
        DecodeCase(
            heads=(16, 16), head_dim=192, value_dim=128, lengths=(32768 + 512,), seqlen_q=512
        ),
    ]


def eight_bit_cases() -> list[DecodeCase]:
    """Cases with keys of 8 bits; beside each is timed the same call on those keys in q's dtype."""
    ragged = log_uniform_lengths(8, 512, 32768)
    return [
        case
        for name in KV_DTYPES
        for case in (
            DecodeCase(kv_dtype=name),
            DecodeCase(kv_dtype=name, lengths=ragged),
            DecodeCase(kv_dtype=name, heads=(8, 1), lengths=(65536,)),
            DecodeCase(kv_dtype=name, page_size=16),
            DecodeCase(kv_dtype=name, lengths=(512,), warm=True),
        )
    ]


def narrower_cases() -> list[DecodeCase]:
    """The instruction sets below the one in use, each of which every x86-64 that has it has."""
    names = ["amx", "avx512_bf16", "avx512", "avx2"]
    used = _C.cpu_instruction_set()
    narrower = names[names.index(used) + 1 :] if used in names else []
    return [
        DecodeCase(instruction_set=name, kv_dtype=kv_dtype)
        for kv_dtype in ("", *KV_DTYPES)
        for name in narrower
    ]


def full_cases() -> list[DecodeCase]:
    """Every dtype, head grouping and head_dim; every length; every small number of queries."""
    cases = standard_cases()
    for dtype in DTYPES:
        for heads in ((32, 8), (8, 1), (32, 32)):
            keys = 8192 if heads == (32, 32) else 32768
            cases += [DecodeCase(dtype, heads, d, (keys,)) for d in (128, 64)]
    cases += [DecodeCase(head_dim=d) for d in (96, 256)]
    cases += [DecodeCase(heads=heads) for heads in ((16, 8), (64, 8))]
    cases += [DecodeCase(head_dim=64, page_size=n) for n in (128, 32, 16)]
    cases += [DecodeCase(lengths=(4096,) * 32)]
    cases += [DecodeCase(lengths=(n,)) for n in (512, 4096, 65536)]
    cases += [DecodeCase(seqlen_q=n) for n in (2, 3, 5, 6, 7)]
    cases += [  # a part of a prompt, and what was read of it before
        DecodeCase(head_dim=d, lengths=(behind + n,), seqlen_q=n)
        for d in (64, 128)
        for n in (512, 2048)
        for behind in (0, 4096, 32768)
    ]
    for dtype in ("fp16", "fp32"):
        cases += [
            DecodeCase(dtype, lengths=log_uniform_lengths(8, 512, 32768)),
            DecodeCase(dtype, lengths=(4096,), seqlen_q=512),
            DecodeCase(dtype, lengths=(512,), warm=True),
            DecodeCase(dtype, lengths=(1,), warm=True),
        ]
    return list({case.name: case for case in reversed(cases)}.values())[::-1]


class Inputs:
    """A case's q and, for every set, K and V in the arena; all sets hold the same values."""

    def __init__(self, case: DecodeCase, arena: InputArena) -> None:
        dtype, batch = DTYPES[case.dtype], len(case.lengths)
        self.lengths = case.lengths
        generator = torch.Generator().manual_seed(0)
        # Scores with a standard deviation of 3: a few keys dominate, many still count.
        q = 3.0 * torch.randn(
            batch, case.heads[0], case.seqlen_q, case.head_dim, generator=generator
        )
        self.q = q.to(dtype)
        self.num_sets = 1 if case.warm else arena.num_sets(kv_set_bytes(case))
        self.page_table = None
        if case.page_size:
            self.page_table = shuffled_pages(case.lengths, case.page_size, generator)
        self.sets = [
            (
                arena.view(2 * i, case.kv_shape, dtype),
                arena.view(2 * i + 1, case.kv_shape, dtype)
                .flatten()[: math.prod(case.value_shape)]
                .view(case.value_shape),
            )
            for i in range(self.num_sets)
        ]
        for first, *others in zip(*self.sets, strict=True):
            first.normal_(generator=generator)
            for b, length in enumerate(case.lengths):
                self._unused(first, b, length).fill_(math.nan)
            for other in others:
                other.copy_(first)
        ends = torch.tensor(case.lengths)[:, None] - torch.arange(case.seqlen_q - 1, -1, -1)
        ranges = torch.stack([torch.zeros_like(ends), ends], dim=-1)
        # A server's call with pages always has ranges: a last page is seldom full.
        self.eight_bit_sets: list[tuple[Tensor, Tensor, dict[str, Any]]] = []
        if case.kv_dtype:
            (k, k_scale), (v, v_scale) = (
                quantise(x, KV_DTYPES[case.kv_dtype]) for x in self.sets[0]
            )
            for _ in self.sets:
                scales = {"k_scale": k_scale.clone(), "v_scale": v_scale.clone()}
                self.eight_bit_sets.append((k.clone(), v.clone(), scales))
        full = case.seqlen_q == 1 and len(set(case.lengths)) == 1 and not case.page_size
        self.key_ranges = None if full else ranges.to(torch.int32)

    def _unused(self, x: Tensor, sequence: int, length: int) -> Tensor:
        """The slots behind the last key of a sequence."""
        if self.page_table is None:
            return x[sequence, :, length:]
        page, slot = divmod(length - 1, x.shape[2])
        return x[int(self.page_table[sequence, page]), :, slot + 1 :]

    def contiguous_sets(self) -> list[tuple[Tensor, Tensor]]:
        """Copies of the pages of every set as `[batch, num_heads_kv, longest, head_dim]`."""
        sequences = zip(*map(self.sequence, range(len(self.lengths))), strict=True)
        k, v = (
            torch.nn.utils.rnn.pad_sequence([x.transpose(0, 1) for x in tensors], batch_first=True)
            .transpose(1, 2)
            .contiguous()
            for tensors in sequences
        )
        return [(k.clone(), v.clone()) for _ in self.sets]

    def sequence(self, sequence: int) -> tuple[Tensor, Tensor]:
        """All keys and values of one sequence, `[num_heads_kv, length, head_dim]`."""
        length = self.lengths[sequence]
        k, v = self.sets[0]
        if self.page_table is None:
            return k[sequence, :, :length], v[sequence, :, :length]
        pages = self.page_table[sequence]
        k, v = (x[pages].transpose(0, 1).flatten(1, 2)[:, :length] for x in (k, v))
        return k, v


def shuffled_pages(lengths: Sequence[int], page_size: int, generator: torch.Generator) -> Tensor:
    """A page table whose pages lie in memory in no order; entries past a sequence's end are 0."""
    counts = pages_of(lengths, page_size)
    order = torch.randperm(sum(counts), generator=generator).to(torch.int32)
    return torch.nn.utils.rnn.pad_sequence(list(order.split(counts)), batch_first=True)


def kv_set_bytes(case: DecodeCase) -> int:
    return 2 * DTYPES[case.dtype].itemsize * math.prod(case.kv_shape)


def visible(case: DecodeCase, *tensors: Tensor) -> list[Tensor]:
    """Return what must be read of K and V, as contiguous pieces; pages as a whole."""
    if case.page_size or len(set(case.lengths)) == 1:
        return list(tensors)
    heads = range(case.heads[1])
    return [x[b, h, :n] for x in tensors for b, n in enumerate(case.lengths) for h in heads]
