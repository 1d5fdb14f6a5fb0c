# SPDX-License-Identifier: BSD-3-Clause
"""The cases: what each is, what failing it means, and which cases' mistakes show in it too."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from .arrays import permuted, to
from .truth import Floats, rounded

BATCH, NUM_HEADS_Q, NUM_HEADS_KV = 3, 8, 2
CONTIGUOUS = "the inputs are taken to be contiguous, and their strides ignored"


def views(x: Floats, convert: Callable[[Any], Any]) -> Any:
    """A copy of `x` with a contiguous last axis, all others in reverse order, and NaN in gaps."""
    *outer, size = x.shape
    storage = np.full((*reversed(outer), size + 8), math.nan, x.dtype)
    order = (*reversed(range(len(outer))), len(outer))
    storage.transpose(order)[..., :size] = x
    return permuted(convert(storage), order)[..., :size]


@dataclass(frozen=True)
class MergeCase:
    """Partial states: ordinary ones, which `change` turns into what the case is about."""

    name: str
    meaning: str
    also: tuple[str, ...] = ()  # cases whose mistake makes this one fail, too
    change: Callable[[Floats, Floats], tuple[Floats, Floats]] = lambda o, lse: (o, lse)
    of_16_bits: bool = False
    views: bool = False

    def parts(self, num_parts: int, dtype: str) -> tuple[Floats, Floats]:
        """o `[num_parts, batch, num_heads_q, 4, 16]` of numbers of `dtype`, and float32 lse."""
        generator = np.random.default_rng(0)
        shape = (num_parts, BATCH, NUM_HEADS_Q, 4)
        o = generator.standard_normal((*shape, 16))
        o, lse = self.change(rounded(o, dtype), 3 * generator.standard_normal(shape))
        return rounded(o, dtype), lse.astype(np.float32)


def _one_part_empty(o: Floats, lse: Floats, content: float) -> tuple[Floats, Floats]:
    """Every row has one empty part, in turn the first, the second and so on."""
    row = np.arange(lse[0].size).reshape(lse.shape[1:])
    empty = row % len(lse) == np.arange(len(lse)).reshape(-1, 1, 1, 1)
    return np.where(empty[..., None], content, o), np.where(empty, -math.inf, lse)


def _all_parts_empty(o: Floats, lse: Floats) -> tuple[Floats, Floats]:
    """Every other row is empty in all parts."""
    empty = np.broadcast_to(np.arange(lse.shape[-1]) % 2 == 0, lse.shape)
    return np.where(empty[..., None], 0.0, o), np.where(empty, -math.inf, lse)


def _far_from_zero(o: Floats, lse: Floats) -> tuple[Floats, Floats]:
    """All parts near 200, all near -200, and the first part far below or far above the others."""
    first = np.array([200.0, -200.0, -200.0, 200.0])
    others = np.array([200.0, -200.0, 200.0, -200.0])
    return o, np.concatenate([lse[:1] + first, lse[1:] + others])


def _equal_and_huge(o: Floats, lse: Floats) -> tuple[Floats, Floats]:
    """All parts are the same, so that the result is theirs if only the weights add up to 1."""
    lse = np.broadcast_to([1e6, -1e6, 1e30, -1e30], lse.shape)
    return np.broadcast_to(o[:1], o.shape), lse


def _cancelling(o: Floats, lse: Floats) -> tuple[Floats, Floats]:
    """The first part is such that the merged row is a 64th of the size of the parts."""
    lse = lse / 6
    weights = np.exp(lse)[..., None]
    o[0] = o[0] / 64 - (weights[1:] * o[1:]).sum(0) / weights[0]
    return o, lse


def _nan(o: Floats, lse: Floats) -> tuple[Floats, Floats]:
    o[-1, 0, 0, 1], lse[-1, 0, 0, 1] = math.nan, math.nan
    return o, lse


MERGE_CASES = (
    MergeCase(
        "ordinary parts",
        "the weight of a part is exp(lse_part - lse), with lse = log(sum of exp(lse_part))",
    ),
    MergeCase(
        "one part is empty",
        "a part with lse = -inf has the weight 0 and must leave the others as they are",
        change=partial(_one_part_empty, content=0.0),
    ),
    MergeCase(
        "o of an empty part is uninitialised",
        "0 * NaN is NaN: a part with lse = -inf must be left out by selection, not by its weight",
        ("one part is empty",),
        partial(_one_part_empty, content=math.nan),
    ),
    MergeCase(
        "all parts are empty",
        "(-inf) - (-inf) is NaN, and 0 / 0 too: such a row is (0, -inf), and lse is not +inf",
        ("one part is empty",),
        _all_parts_empty,
    ),
    MergeCase(
        "lse near 200 and -200",
        "exp overflows above 88: the largest lse of the parts must be subtracted first, not that "
        "of one part",
        change=_far_from_zero,
    ),
    MergeCase(
        "equal parts with lse of 1e6 and 1e30",
        "the weights do not add up to 1: lse absorbs log(num_parts) when it is rounded, so divide "
        "by the sum of the weights and do not rely on exp(lse_part - lse)",
        ("lse near 200 and -200",),
        _equal_and_huge,
    ),
    MergeCase(
        "16-bit parts that cancel",
        "weighted parts or their sums are rounded to 16 bits: merge in float32 and round once",
        change=_cancelling,
        of_16_bits=True,
    ),
    MergeCase(
        "NaN in one row of one part",
        "the NaN of a part must reach its own row, or a broken rank goes unnoticed, and no other",
        change=_nan,
    ),
    MergeCase("views with strides", CONTIGUOUS, views=True),
)


@dataclass(frozen=True)
class DecodeProblem:
    """Decoding over the shards of a cache: the last tokens of each sequence attend to all of it.

    The query `t` of `seqlen_q` is at position `p = seq_lens - seqlen_q + t`, and sees the keys of
    the slots up to p, with a window the last `window` of them.
    """

    q: Any  # [batch, num_heads_q, seqlen_q, head_dim]
    k_shards: tuple[Any, ...]  # of each rank [batch, num_heads_kv, slots of the rank, head_dim]
    v_shards: tuple[Any, ...]  # the same shapes
    # int64 [batch] on the CPU: slots of all ranks together; those from there on hold garbage
    seq_lens: Any
    window: int | None
    slots: tuple[Any, ...]  # int64 on the CPU: the slots of each rank, in the order of its shard
    block: int | None  # slot i is on rank i // block % world_size; None: see `bounds`

    @property
    def bounds(self) -> tuple[int, ...]:
        """Where shards of consecutive slots begin, and the end of the last."""
        return tuple(int(n) for n in np.cumsum([0, *map(len, self.slots)]))

    def key_ranges(self, rank: int | None = None) -> Any:
        """int32 `[batch, seqlen_q, 2]` on the CPU: the slots that each query sees, or those of them
        that `rank` has, counted in its shard; there are none where begin is not below end."""
        seqlen_q = self.q.shape[2]
        seq_lens = np.asarray(self.seq_lens)
        end = (seq_lens[:, None] - seqlen_q + 1 + np.arange(seqlen_q)).clip(min=0)
        begin = np.zeros_like(end) if self.window is None else (end - self.window).clip(min=0)
        if rank is not None:
            mine = np.asarray(self.slots[rank])
            begin, end = (np.searchsorted(mine, x) for x in (begin, end))
        ranges = np.stack([begin, end], -1).astype(np.int32)
        return ranges if isinstance(self.seq_lens, np.ndarray) else to("cpu")(ranges)


@dataclass(frozen=True)
class DecodeCase:
    name: str
    meaning: str
    also: tuple[str, ...] = ()  # cases whose mistake makes this one fail, too
    seq_lens: tuple[int, ...] = (37, 300, 128)
    seqlen_q: int = 1
    window: int | None = None
    block: int | None = 1  # of slots that ranks get in turn; None: uneven shards
    of_16_bits: bool = False
    padding: float = 30.0  # times a random number
    score: float | None = None  # near which all scores lie, with either sign
    cancel: bool = False  # whether merged values are a 64th of the shards' in size
    views: bool = False

    def slots(self, world_size: int) -> tuple[Any, ...]:
        slots = np.arange(max(self.seq_lens))
        if self.block is not None:
            owner = slots // self.block % world_size
            return tuple(slots[owner == rank] for rank in range(world_size))
        # The first rank has nothing, each following one a larger share of consecutive slots.
        shares = np.array([rank * (rank + 1) // 2 for rank in range(world_size)])
        return tuple(np.split(slots, (len(slots) * shares // shares[-1])[:-1]))

    def make(self, world_size: int, dtype: str) -> tuple[DecodeProblem, Floats, Floats]:
        """The problem in NumPy's arrays, and the whole keys and values."""
        generator = np.random.default_rng(0)
        seq_lens, slots = np.array(self.seq_lens), max(self.seq_lens)
        head_dim = 64
        q = 3.0 * generator.standard_normal((BATCH, NUM_HEADS_Q, self.seqlen_q, head_dim))
        k, v = generator.standard_normal((2, BATCH, NUM_HEADS_KV, slots, head_dim))
        if self.score is not None:
            signs = np.array([1.0, -1.0] * (NUM_HEADS_Q // 2))[:, None, None]
            q, k = np.broadcast_to(signs * self.score * head_dim**-0.5, q.shape), 1 + k / 100
        owned = self.slots(world_size)
        if self.cancel:
            # Ranks in turn have values of either sign, and the last one of an odd number has none.
            sign = np.empty((slots, 1))
            for rank, mine in enumerate(owned):
                sign[mine] = 0 if rank == world_size // 2 * 2 else 1 - 2 * (rank % 2)
            k, v = np.zeros_like(k), v[:, :, :1] * (sign + 1 / 64) + v / 64
        unused = (np.arange(slots) >= seq_lens[:, None])[:, None, :, None]
        q, k, v = (
            rounded(x, dtype) for x in (q, *(np.where(unused, self.padding * x, x) for x in (k, v)))
        )
        k_shards, v_shards = (tuple(x[:, :, mine] for mine in owned) for x in (k, v))
        parts = q, k_shards, v_shards, seq_lens, self.window, owned, self.block
        return DecodeProblem(*parts), k, v


DECODE_CASES = (
    DecodeCase(
        "one query token",
        "slot i of a sequence is on rank i % world_size, whose shard has it at i // world_size",
    ),
    DecodeCase(
        "blocks of 16 slots",
        "slot i of a sequence is on rank i // 16 % world_size, whose shard has it at "
        "i // (16 * world_size) * 16 + i % 16",
        block=16,
    ),
    DecodeCase(
        "uneven and empty shards",
        "the length of a shard is not that of the others: the first one has no slots at all",
        ("blocks of 16 slots",),
        block=None,
    ),
    DecodeCase(
        "sequences with keys on one rank only",
        "a rank without keys of a sequence has the state (0, -inf), which its peers must leave out",
        ("blocks of 16 slots",),
        seq_lens=(1, 5, 16),
        block=16,
    ),
    DecodeCase(
        "a sequence without keys",
        "no rank has keys of it: o is 0 and lse is -inf, not NaN and not +inf",
        seq_lens=(0, 40, 0),
    ),
    DecodeCase(
        "several query tokens",
        "in every shard each query sees the shard's slots below its own position; a mask that "
        "counts back from the end of the shard shows it others",
        seq_lens=(37, 300, 6),
        seqlen_q=5,
    ),
    DecodeCase(
        "a sliding window",
        "the window is counted in slots of the sequence, and a shard has only some of them",
        seq_lens=(37, 300, 20),
        window=32,
    ),
    DecodeCase(
        "a sliding window of several query tokens",
        "each query has a begin and an end of its own in every shard, and none in some shards",
        ("several query tokens", "a sliding window", "blocks of 16 slots"),
        seq_lens=(37, 300, 20),
        seqlen_q=5,
        window=12,
        block=16,
    ),
    DecodeCase(
        "lengths of 1, 700 and 20,000",
        "the split of the work has lost or repeated keys of the long or of the short sequence",
        ("blocks of 16 slots",),
        seq_lens=(1, 20_000, 700),
        block=16,
    ),
    DecodeCase(
        "scores near 2,000 and -2,000",
        "the running maximum begins at a finite number in place of -inf, or is not subtracted",
        score=2000.0,
    ),
    DecodeCase(
        "16-bit shards that cancel",
        "partial states travel or merge in 16 bits: they should be float32 and be rounded once",
        seq_lens=(60, 300, 120),
        of_16_bits=True,
        cancel=True,
    ),
    DecodeCase(
        "NaN behind the last token",
        "0 * NaN is NaN: unused slots must not be read, or values selected away with their keys",
        padding=math.nan,
    ),
    DecodeCase("views with strides", CONTIGUOUS, views=True),
)
