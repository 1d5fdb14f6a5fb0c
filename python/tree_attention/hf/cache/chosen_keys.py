# SPDX-License-Identifier: BSD-3-Clause
"""Models in which an index chooses the keys of each query, over keys of the index on all ranks.

Next to its keys a layer caches one row of a token for the index, and the indexer of transformers
scores all of them with a few heads:

    score = sum over heads of w_h * relu(scale * q_h . k)

The first topk slots in the order of scores, and of slots where scores are equal, are what the query
attends to. A rank has the index keys of its own slots alone, so what `update_indexer` returns is no
tensor but an expression: it notes the five operations that follow, and with the last one, `topk`,
each rank chooses among its slots and the choices are merged, which is exact, as the first topk of a
union are among the first topk of its parts. An indexer with any other operation is refused. Where
the tokens of a prompt are split over ranks, each gets the index keys, and then the keys or latents,
of all slots instead, and chooses for its own tokens as one rank alone does.

Elsewhere (MiniMax-M3) each head of the index chooses blocks of slots, for one head of keys, by the
largest score of a block, and the blocks next to the query are chosen whatever their scores.

Source: DeepSeek-V3.2 (arXiv:2512.02556), section 2.1.
"""

import math
from typing import Any, NamedTuple, NoReturn

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from torch.overrides import resolve_name

from ...exchange import all_merge_topk
from ...index import check_cpu, index_topk
from ...ops import append_kv
from ...sharding import BlockCyclic, ShardLayout
from .fixed import StaticTreeCacheLayer
from .growing import TreeCacheLayer
from .latent import LatentLayer
from .token_split import current_token_split

# What a piece of queries may choose, on its way from all ranks and to local slots, takes at most
# this.
_MAX_CANDIDATE_BYTES = 32 << 20
_CANDIDATE_BYTES = 8  # a score and a slot
_ROW_BYTES = 40  # of the integers in which `local_rows` looks up and sorts a slot

_MATMULS = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)
_RELUS = (F.relu, torch.relu, torch.Tensor.relu)
# The operations that may follow each one; the first is what `update_indexer` returned.
_NEXT: dict[str, tuple[str, ...]] = {
    "": ("transpose",),
    "transpose": ("float",),
    "float": ("unsqueeze",),
    "unsqueeze": ("score",),
    "score": ("mul", "relu"),
    "mul": ("relu",),
    "relu": ("weigh",),
    "weigh": ("squeeze",),
    "squeeze": ("masked_fill",),
    "masked_fill": ("topk",),
    "topk": (),
}


NEEDS_CACHE = (
    "an index chooses the keys of this model, and they must be in a TreeCache: call "
    "tree_attention.hf.enable(model), and generate without use_cache=False"
)
_HOLE = (
    "the padding mask of a row has a hole, zeros between ones, around which an index that chooses "
    "keys does not see; generate from each row alone"
)


class _NoTensor:
    """Stands for a tensor inside an indexer; nothing outside of an indexer computes with it."""

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"tree_attention: {NEEDS_CACHE}")


class SeenKeys(_NoTensor):
    """The mask that an indexer takes for one of all keys: of one head of `KeyRanges`."""

    dtype = torch.bool

    def __init__(self, ranges: Any) -> None:
        self.ranges = ranges

    def __invert__(self) -> "HiddenKeys":
        return HiddenKeys(self.ranges)


class HiddenKeys(_NoTensor):
    """The keys that a query of `KeyRanges` does not see."""

    def __init__(self, ranges: Any) -> None:
        self.ranges = ranges


class Choice(_NoTensor):
    """The keys that an index chose, in place of a tensor of slots, for the attention function."""

    def __init__(self, rows: Tensor | None, run: int = 1, lengths: Tensor | None = None) -> None:
        # int32 [batch, 1 or num_heads_kv, seqlen_q, n]: local slots, or runs of `run` of them,
        # ascending, and then -1; where the tokens of a prompt are split, global ones. None: every
        # key that the query sees.
        self.rows, self.run = rows, run
        self.lengths = lengths  # [batch, seqlen_q]: slots that a query sees; None: all in rows

    def to(self, _: torch.dtype) -> "Choice":
        return self


class _TopK(NamedTuple):
    indices: Choice


class IndexScores(_NoTensor):
    """Takes the place of a layer's cached index keys, and of what an indexer makes of them."""

    def __init__(self, layer: "IndexedLayer", step: str = "", **noted: Any) -> None:
        self._layer, self._step, self._noted = layer, step, noted

    def _then(
        self, step: str, called: Any, is_as_known: bool = True, **noted: Any
    ) -> "IndexScores":
        if not is_as_known or step not in _NEXT[self._step]:
            raise self._unknown(called)
        return IndexScores(self._layer, step, **self._noted, **noted)

    def _unknown(self, called: Any) -> NotImplementedError:
        """`called`: a function, or its name."""
        name = self._layer.index.model_type
        if not isinstance(called, str):
            called = resolve_name(called) or str(called)
        return NotImplementedError(
            f"tree_attention: the index of {name!r} calls {called} where it is not known; "
            f"transformers {transformers.__version__} is newer than this release"
        )

    @classmethod
    def __torch_function__(
        cls, function: Any, _: Any, args: Any = (), kwargs: Any = None
    ) -> "IndexScores":
        if function in _MATMULS and len(args) == 2 and isinstance(args[1], IndexScores):
            x, own = args
            if own._step == "unsqueeze":
                return own._then("score", function, x.dim() == 4, queries=x)
            return own._then("weigh", function, x.dim() == 4 and x.shape[2] == 1, weights=x)
        own = next(x for x in (*args, *(kwargs or {}).values()) if isinstance(x, IndexScores))
        is_plain = function in _RELUS and args[:1] == (own,) and not any((kwargs or {}).values())
        return own._then("relu", function, is_plain)

    def transpose(self, *axes: int) -> "IndexScores":
        return self._then("transpose", "Tensor.transpose", axes == (-1, -2))

    def float(self) -> "IndexScores":
        return self._then("float", "Tensor.float")

    def unsqueeze(self, axis: int) -> "IndexScores":
        return self._then("unsqueeze", "Tensor.unsqueeze", axis == 1)

    def squeeze(self, axis: int) -> "IndexScores":
        return self._then("squeeze", "Tensor.squeeze", axis == -2)

    def __mul__(self, scale: Any) -> "IndexScores":
        return self._then("mul", "Tensor.mul", isinstance(scale, (int, float)), scale=scale)

    def masked_fill(self, mask: Any, value: Any) -> "IndexScores":
        is_known = isinstance(mask, HiddenKeys) and value == float("-inf")
        return self._then(
            "masked_fill", "Tensor.masked_fill", is_known, ranges=getattr(mask, "ranges", None)
        )

    @property
    def shape(self) -> tuple[int, ...]:
        if self._step != "masked_fill":
            raise self._unknown("Tensor.shape")
        ranges = self._noted["ranges"].ranges
        return (*ranges.shape[:2], self._layer.kv_length)

    def topk(self, k: int, dim: int = -1) -> _TopK:
        noted = self._then("topk", "Tensor.topk", dim == -1)._noted
        layer, weights = self._layer, noted["weights"][:, :, 0].transpose(1, 2)
        query = IndexQuery(
            layer, noted["queries"].transpose(1, 2), weights, noted.get("scale", 1.0)
        )
        return _TopK(query.choose(noted["ranges"], k))

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise self._unknown(f"Tensor.{name}")


class IndexQuery:
    """The queries of a layer's index, and the numbers by which it scores keys."""

    def __init__(
        self, layer: "IndexedLayer", queries: Tensor, weights: Tensor | None, scale: float = 1.0
    ) -> None:
        self.layer, self.queries = layer, queries  # [batch, heads, seqlen_q, columns]
        self.weights, self.scale = weights, scale  # float32 [batch, heads, seqlen_q]

    def choose(self, ranges: Any, topk: int, block: int = 1, local_blocks: int = 0) -> Choice:
        """The first `topk` keys, or blocks, over all ranks, of those in the `KeyRanges`."""
        if ranges.unsupported is not None:
            raise NotImplementedError(f"tree_attention: {ranges.unsupported}")
        layer, shard = self.layer, self.layer.shard
        check_cpu("index_topk", "k", layer.index_keys)  # in time: not when there is a choice
        # All ranks know it: none scores or sends anything before there is something to choose.
        if layer.most_tokens <= topk * block:
            return Choice(None)
        if ranges.skipped is not None:
            raise NotImplementedError(f"tree_attention: {_HOLE}")
        split = current_token_split()
        layout, rank, num_parts = shard.layout, shard.rank, shard.world_size
        keys = layer.index_keys
        if split is not None:  # this rank has all keys, and chooses for its own tokens
            layout, rank, num_parts = BlockCyclic(1), 0, 1
            keys = split.all_rows("index_keys", keys)
        keys = keys[:, :, : layout.count(rank, layer.kv_length)]
        local_ranges, key_slots = ranges.whole(), None
        if num_parts > 1:
            local_ranges = ranges.local(layout, rank)
            key_slots = ranges.key_slots(layout, rank)
        positions = ranges.positions if local_blocks else None
        if split is not None:
            local_ranges = local_ranges[:, split.own]
            positions = None if positions is None else positions[:, split.own]
        # transformers multiplies them in float32, but they are numbers of the model's dtype.
        queries = self.queries.to(keys.dtype)
        batch, _, seqlen_q, _ = queries.shape
        heads = queries.shape[1] if self.weights is None else 1
        run = _run(layout, block)
        firsts = torch.arange(0, block, run, device=keys.device)  # of the runs of a block
        entry_bytes = _CANDIDATE_BYTES * (1 + num_parts) + _ROW_BYTES * len(firsts)
        query_bytes = batch * heads * topk * entry_bytes
        step, parts = max(1, _MAX_CANDIDATE_BYTES // query_bytes), []
        for tokens in (slice(begin, begin + step) for begin in range(0, seqlen_q, step)):
            its_ranges = local_ranges[:, tokens]
            scores, slots = index_topk(
                queries[:, :, tokens],
                keys,
                None if self.weights is None else self.weights[:, :, tokens],
                its_ranges,
                topk=topk,
                scale=self.scale,
                block=block,
                local_blocks=local_blocks,
                key_slots=key_slots,
                query_positions=None if positions is None else positions[:, tokens],
            )
            if num_parts > 1:
                _, slots = all_merge_topk(
                    scores,
                    slots,
                    shard.comm,
                    topk=topk,
                    index_dtype=keys.dtype,
                    timeout=shard.timeout,
                )
            if block > 1:
                slots = torch.where(slots < 0, -1, slots.long() * block)[..., None]
                slots = torch.where(slots < 0, -1, slots + firsts).flatten(-2)
            rows = layout.local_rows(rank, slots)
            if block > 1:
                is_seen = (rows >= 0) & (rows < its_ranges[:, None, :, 1:])
                rows = torch.where(is_seen, rows // run, -1)
            parts.append(rows)
        rows = torch.cat(parts, dim=2)
        return Choice(rows) if block == 1 else Choice(rows, run, local_ranges[..., 1])


def _run(layout: ShardLayout, block: int) -> int:
    """The length of the runs of slots, each on one rank, into which a layout cuts all blocks. Local
    runs begin at multiples of it too."""
    if layout.world_size == 1:
        return block
    return math.gcd(block, layout.block) if isinstance(layout, BlockCyclic) else 1


class BlockChoice(_NoTensor):
    """The queries of an index that chooses blocks for each head of keys, in place of the blocks:
    which keys they see, the attention function is told."""

    def __init__(self, query: IndexQuery, topk: int, block: int, local_blocks: int) -> None:
        self._query, self._numbers = query, (topk, block, local_blocks)

    def choose(self, ranges: Any) -> Choice:
        ranges.check_not_padded(self._query.layer.index.model_type)
        return self._query.choose(ranges, *self._numbers)


class Index(NamedTuple):
    """The index of a layer."""

    columns: int  # of its keys
    model_type: str  # for messages
    block: int  # slots of a block, where it chooses blocks

    @classmethod
    def of(cls, config: Any) -> "Index":
        block = getattr(config, "index_block_size", 1)
        return cls(config.index_head_dim, config.model_type, block)


class IndexedLayer(TreeCacheLayer):
    """The keys and values of one layer that this rank holds, and the keys of its index."""

    def __init__(self, *args: Any, index: Index, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.index, self.index_columns = index, index.columns
        # The slots of tokens whose index keys are still to come, and their number.
        self._expected: tuple[Tensor, int] | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        dtype, sizes = self.index_dtype or key_states.dtype, (len(key_states), 1, 0)
        self.index_keys = key_states.new_empty((*sizes, self.index_columns), dtype=dtype)
        super().lazy_initialization(key_states, value_states)

    def capacity(self, num_slots: int) -> int:
        """A whole number of blocks: with a part of one, `by_rows` makes pages of single keys."""
        block = self.index.block
        return -(-super().capacity(num_slots) // block) * block

    def append(self, keys: Tensor, values: Tensor, slots: Tensor, num_tokens: int) -> Any:
        self._expected = slots[0], num_tokens
        return super().append(keys, values, slots, num_tokens)

    def end(self, num_tokens: int) -> None:
        """Tokens count when `append_index_keys` has stored the rest of them."""

    def append_index_keys(self, states: Tensor) -> None:
        """Appends the index keys `[batch, 1, tokens, columns]` of the tokens that `update` took."""
        expected, self._expected = self._expected, None
        if expected is None:
            raise RuntimeError(
                "TreeCache: index keys follow the keys and values of the same tokens, which "
                "update takes"
            )
        slots, num_tokens = expected
        split = current_token_split()
        computed = num_tokens if split is None else len(split.own)
        shape = [len(self.key_rows), 1, computed, self.index_columns]
        if list(states.shape) != shape:
            raise ValueError(
                f"TreeCache: the layer takes index keys of shape {shape}, got {list(states.shape)}"
            )
        if states.dtype != self.index_keys.dtype:
            self._become(states.dtype)
        rows, held = states.detach(), self.index_keys
        if split is not None:
            rows, _ = split.rows_of_owner(rows, rows[..., :0])
        places = self.places(slots).expand(len(rows), -1)
        append_kv(rows, rows[..., :0], held, held[..., :0], places)
        super().end(num_tokens)

    def _become(self, dtype: torch.dtype) -> None:
        """Keeps index keys in `dtype`, where none are kept yet."""
        if self.length > 0:
            raise ValueError(
                f"TreeCache: the cache holds index keys of {self.index_keys.dtype}, got {dtype}; "
                "convert them, or forget the tokens with reset"
            )
        self.index_dtype = dtype
        with torch.inference_mode(False), torch.no_grad():
            keys = torch.empty_like(self.index_keys, dtype=dtype)
            self.hold(self.buffers() | {"index_keys": keys}, self.dropped)

    @property
    def most_tokens(self) -> int:
        """An upper bound on the number of tokens, including the tokens of this forward pass."""
        return self.kv_length


class IndexedLatentLayer(IndexedLayer, LatentLayer):
    """The latents of one layer that this rank holds, and the keys of its index."""

    def update_indexer(self, states: Tensor) -> IndexScores:
        """Appends index keys `[batch, tokens, columns]`. Returns an object that stands for the
        index keys of all tokens."""
        self.append_index_keys(states[:, None])
        return IndexScores(self)


class _StaticIndexedLayer(IndexedLayer, StaticTreeCacheLayer):
    @property
    def most_tokens(self) -> int:
        progress = self.progress
        is_known = not torch.compiler.is_compiling() and self.index_keys.device.type == "cpu"
        return progress.read() + progress.num_tokens if is_known else progress.max_length


class StaticIndexedLatentLayer(IndexedLatentLayer, _StaticIndexedLayer):
    """The latents and index keys of one layer, in buffers for `max_length` tokens."""


class BlockLayer(IndexedLayer):
    """The keys and values of one layer that this rank holds, and the keys of an index of blocks."""


class StaticBlockLayer(BlockLayer, _StaticIndexedLayer):
    """The keys, values and index keys of one layer, in buffers for `max_length` tokens."""
