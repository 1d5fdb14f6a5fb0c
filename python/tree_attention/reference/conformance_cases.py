# SPDX-License-Identifier: BSD-3-Clause
"""The cases of `conformance`: what each is, and what failing it means."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..sharding import BlockCyclic, Contiguous, ShardLayout

BATCH, NUM_HEADS_Q, NUM_HEADS_KV = 3, 8, 2
CONTIGUOUS = "the inputs are taken to be contiguous, and their strides ignored"


def views(x: Tensor) -> Tensor:
    """A copy of `x` with a contiguous last axis, all others in reverse order, and NaN in gaps."""
    *outer, size = x.shape
    storage = x.new_full((*reversed(outer), size + 8), math.nan)
    return storage.permute(*reversed(range(len(outer))), -1)[..., :size].copy_(x)


@dataclass(frozen=True)
class MergeCase:
    """Partial states: ordinary ones, of which `change` makes what the case is about."""

    name: str
    meaning: str
    change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = lambda o, lse: (o, lse)
    views: bool = False

    def parts(self, num_parts: int) -> tuple[Tensor, Tensor]:
        """float32 or bfloat16 `o [num_parts, batch, num_heads_q, 4, 16]` and its float32 lse."""
        generator = torch.Generator().manual_seed(0)
        shape = (num_parts, BATCH, NUM_HEADS_Q, 4)
        lse = 3 * torch.randn(shape, generator=generator)
        return self.change(torch.randn(*shape, 16, generator=generator), lse)


def _one_part_empty(o: Tensor, lse: Tensor, content: float) -> tuple[Tensor, Tensor]:
    """Every row has one empty part, in turn the first, the second and so on."""
    row = torch.arange(lse[0].numel()).view(lse.shape[1:])
    empty = row % len(lse) == torch.arange(len(lse)).view(-1, 1, 1, 1)
    return o.masked_fill(empty[..., None], content), lse.masked_fill(empty, -math.inf)


def _all_parts_empty(o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Every other row is empty in all parts."""
    empty = (torch.arange(lse.shape[-1]) % 2 == 0).expand_as(lse)
    return o.masked_fill(empty[..., None], 0), lse.masked_fill(empty, -math.inf)


def _far_from_zero(o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """All parts near 200, all near -200, and the first part far below or far above the others."""
    first = torch.tensor([200.0, -200.0, -200.0, 200.0])
    others = torch.tensor([200.0, -200.0, 200.0, -200.0])
    return o, torch.cat([lse[:1] + first, lse[1:] + others])


def _equal_and_huge(o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """All parts are the same, so that the result is theirs if only the weights add up to 1."""
    lse = torch.tensor([1e6, -1e6, 1e30, -1e30]).expand_as(lse)
    return o[:1].expand_as(o).contiguous(), lse.contiguous()


def _cancelling_bfloat16(o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """The first part is such that the merged row is a 64th of the size of the parts."""
    lse = lse / 6
    weights = lse.softmax(0)[..., None]
    o = o.bfloat16().float()
    o[0] = (o[0] / 64 - (weights[1:] * o[1:]).sum(0)) / weights[0]
    return o.bfloat16(), lse


def _nan(o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
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
        partial(_one_part_empty, content=0.0),
    ),
    MergeCase(
        "o of an empty part is uninitialised",
        "0 * NaN is NaN: a part with lse = -inf must be left out by selection, not by its weight",
        partial(_one_part_empty, content=math.nan),
    ),
    MergeCase(
        "all parts are empty",
        "(-inf) - (-inf) is NaN, and 0 / 0 too: such a row is (0, -inf), and lse is not +inf",
        _all_parts_empty,
    ),
    MergeCase(
        "lse near 200 and -200",
        "exp overflows above 88: the largest lse of the parts must be subtracted first, not that "
        "of one part",
        _far_from_zero,
    ),
    MergeCase(
        "equal parts with lse of 1e6 and 1e30",
        "the weights do not add up to 1: lse absorbs log(num_parts) when it is rounded, so divide "
        "by the sum of the weights and do not rely on exp(lse_part - lse)",
        _equal_and_huge,
    ),
    MergeCase(
        "bfloat16 parts that cancel",
        "weighted parts or their sums are rounded to bfloat16: merge in float32 and round once",
        _cancelling_bfloat16,
    ),
    MergeCase(
        "NaN in one row of one part",
        "the NaN of a part must reach its own row, or a broken rank goes unnoticed, and no other",
        _nan,
    ),
    MergeCase("views with strides", CONTIGUOUS, views=True),
)


@dataclass(frozen=True)
class DecodeProblem:
    """Decoding over the shards of a cache: the last tokens of each sequence attend to all of it.

    The query `t` of `seqlen_q` is at position `p = seq_lens - seqlen_q + t`, and sees the keys of
    the slots up to p, with a window the last `window` of them.
    """

    q: Tensor  # [batch, num_heads_q, seqlen_q, head_dim]
    k_shards: tuple[Tensor, ...]  # of each rank [batch, num_heads_kv, slots of the rank, head_dim]
    v_shards: tuple[Tensor, ...]  # the same shapes
    # int64 [batch] on the CPU: slots of all ranks together; those from there on hold garbage
    seq_lens: Tensor
    window: int | None
    layout: ShardLayout  # which rank has which slots, in the order of the slots

    def key_ranges(self, rank: int | None = None) -> Tensor:
        """int32 `[batch, seqlen_q, 2]` on the CPU: the slots that each query sees, or those of them
        that `rank` has, counted in its shard; there are none where begin is not below end."""
        seqlen_q = self.q.shape[2]
        end = (self.seq_lens[:, None] - seqlen_q + 1 + torch.arange(seqlen_q)).clamp(min=0)
        begin = torch.zeros_like(end) if self.window is None else (end - self.window).clamp(min=0)
        if rank is not None:
            begin, end = self.layout.local_range(rank, begin, end)
        return torch.stack([begin, end], -1).int()


@dataclass(frozen=True)
class DecodeCase:
    name: str
    meaning: str
    seq_lens: tuple[int, ...] = (37, 300, 128)
    seqlen_q: int = 1
    window: int | None = None
    block: int | None = 1  # of a block-cyclic layout; None: uneven shards
    dtype: torch.dtype | None = None  # None: what the caller asks for
    padding: float = 30.0  # times a random number
    score: float | None = None  # near which all scores lie, with either sign
    cancel: bool = False  # whether the merged values are a 64th of the size of those of the shards
    views: bool = False

    def make(
        self, world_size: int, dtype: torch.dtype, device: torch.device | str
    ) -> tuple[DecodeProblem, Tensor, Tensor]:
        """The problem, and the whole keys and values on the CPU."""
        generator = torch.Generator().manual_seed(0)
        dtype, seq_lens = self.dtype or dtype, torch.tensor(self.seq_lens)
        head_dim, slots = 64, max(self.seq_lens)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        q = 3.0 * normal(BATCH, NUM_HEADS_Q, self.seqlen_q, head_dim)
        k, v = normal(2, BATCH, NUM_HEADS_KV, slots, head_dim).unbind()
        if self.score is not None:
            signs = torch.tensor([1.0, -1.0]).repeat(NUM_HEADS_Q // 2)[:, None, None]
            q, k = signs * self.score * head_dim**-0.5 * torch.ones_like(q), 1 + k / 100
        layout: ShardLayout
        if self.block is None:
            # The first rank has nothing, each following one a larger share of consecutive slots.
            shares = [rank * (rank + 1) // 2 for rank in range(world_size)]
            layout = Contiguous((0, *(slots * share // shares[-1] for share in shares)))
        else:
            layout = BlockCyclic(world_size, self.block)
        if self.cancel:
            # Ranks in turn have values of either sign, and the last one of an odd number has none.
            owner = layout.owner(torch.arange(slots))[:, None]
            sign = (1 - 2 * (owner % 2)).masked_fill(owner == world_size // 2 * 2, 0)
            k, v = torch.zeros_like(k), v[:, :, :1] * (sign + 1 / 64) + v / 64
        unused = (torch.arange(slots) >= seq_lens[:, None])[:, None, :, None]
        k, v = (torch.where(unused, self.padding * x, x).to(dtype) for x in (k, v))
        q = q.to(dtype)

        def place(x: Tensor) -> Tensor:
            return views(x.to(device)) if self.views else x.to(device)

        owned = [layout.local_slots(rank, 0, slots) for rank in range(world_size)]
        k_shards, v_shards = (tuple(place(x[:, :, mine]) for mine in owned) for x in (k, v))
        return DecodeProblem(place(q), k_shards, v_shards, seq_lens, self.window, layout), k, v


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
        block=None,
    ),
    DecodeCase(
        "sequences with keys on one rank only",
        "a rank without keys of a sequence has the state (0, -inf), which its peers must leave out",
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
        "each query has bounds of its own in every shard, the number of the shard's slots below "
        "its position; the last queries of a shard's own length are others",
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
        seq_lens=(37, 300, 20),
        seqlen_q=5,
        window=12,
        block=16,
    ),
    DecodeCase(
        "lengths of 1, 700 and 20,000",
        "the split of the work has lost or repeated keys of the long or of the short sequence",
        seq_lens=(1, 20_000, 700),
        block=16,
    ),
    DecodeCase(
        "scores near 2,000 and -2,000",
        "the running maximum begins at a finite number in place of -inf, or is not subtracted",
        score=2000.0,
    ),
    DecodeCase(
        "bfloat16 shards that cancel",
        "partial states travel or merge in bfloat16: they should be float32 and be rounded once",
        seq_lens=(60, 300, 120),
        dtype=torch.bfloat16,
        cancel=True,
    ),
    DecodeCase(
        "NaN behind the last token",
        "0 * NaN is NaN: unused slots must not be read, or values selected away with their keys",
        padding=math.nan,
    ),
    DecodeCase("views with strides", CONTIGUOUS, views=True),
)
