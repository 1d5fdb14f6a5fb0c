# SPDX-License-Identifier: BSD-3-Clause
"""The mask function: what each query may see, as half-open ranges of global cache slots.

Each query has one range. It has two in a batch where some row has a hole in its padding mask, for
example between a document and a question that is padded on the left. After a hole, a window counts
tokens and not slots, so that a row sees what it would see alone.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import AttentionMaskInterface
from transformers.masking_utils import causal_mask_function

from ..sharding import ShardLayout
from .cache.chosen_keys import SeenKeys
from .cache.token_split import current_token_split

_NO_RANGE = (
    "supports causal and sliding-window masks only, not chunked, packed, blockwise or "
    "bidirectional ones"
)
# A compiled graph copies it into a string of C++, where it cannot have quotes.
_HOLE = "the padding mask of each row must be one run of ones, but a row has a hole"
_HOLE_IN_FIXED = (
    "the padding mask of a row has a hole, zeros between ones, which a cache of fixed size does "
    "not support on a GPU; make the cache without max_length"
)
HOLE_BESIDE_STATES = (
    "the padding mask of a row has a hole, zeros between ones, which layers that keep a state take "
    "for tokens; give the batch texts of one length, or generate from each row alone"
)

_PADDED = (
    "{} chooses blocks of cache slots, which left padding shifts, also in transformers; run "
    "prompts of different lengths one by one"
)
_WIDTH = "the padding mask must have shape [batch, cached + new tokens]"


class KeyRanges:
    """The mask that `tree_attention_mask` returns and transformers hands to every layer.

    Query `i` of sequence `b` sees the global slots `[ranges[b, i, 0], ranges[b, i, 1])`. If a row
    has a hole, it sees the range before it, `ranges[b, i, 0]`, and after it, `ranges[b, i, 1]`. A
    mask that is no such range has the reason in `unsupported`, and the layer that is given it
    raises: models also build masks that none of their layers use.

    With a cache of fixed size `generate` makes the masks before the forward pass, and treats what
    it gets as a tensor of four axes.
    """

    ndim = 4

    def __init__(
        self,
        ranges: Tensor,
        kv_length: int,
        kv_offset: int = 0,
        unsupported: str | None = None,
        window: int | None = None,
        skipped: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> None:
        self.ranges = ranges  # int64 [batch, seqlen_q, 2], or [batch, seqlen_q, 2, 2]
        # int64 [batch, seqlen_q], where a row has a hole: its slots before each query.
        self.skipped = skipped
        self._positions = positions
        self._within: dict[tuple[int, int], KeyRanges] = {}
        self.kv_length = kv_length  # number of keys that the layer attends to
        self.kv_offset = kv_offset  # global slot of the first of them, where keys are not sharded
        self.unsupported = unsupported
        self.window = window  # no query sees more slots; None: any
        self._known: dict[tuple[object, ...], Tensor] = {}  # see _once
        self._in_rings: dict[tuple[object, ...], tuple[Tensor, Tensor]] = {}

    def contiguous(self) -> "KeyRanges":
        return self

    def to(self, _: torch.dtype) -> "KeyRanges":  # MPT makes a mask of bool
        return self

    def __getitem__(self, key: Any) -> SeenKeys:  # an indexer takes the mask of one head
        if key[:2] != (slice(None), 0) or any(x != slice(None) for x in key[2:]):
            raise TypeError(f"tree_attention: an attention mask is a KeyRanges here, got [{key}]")
        return SeenKeys(self)

    def local(self, layout: ShardLayout, rank: int, dropped: int = 0) -> Tensor:
        """The ranges in local slots of `rank`, counted from the one with the number `dropped`."""
        # This is `layout.local_range` for the begins and the ends in one call: the local begin is
        # the number of slots that the rank holds before the range, and the end likewise.
        key = layout, rank, dropped
        return self._once(key, lambda: layout.count(rank, self.ranges) - dropped)

    def within(self, begin: int, end: int) -> "KeyRanges":
        """The part of the ranges in [begin, end): one for each query, unless one sees slots on
        both sides of a hole there. The kernels read one range faster."""
        key = begin, end
        if key not in self._within:
            ranges, skipped, positions = self.ranges.clamp(begin, end), self.skipped, self.positions
            if skipped is not None:
                is_first, is_second = (ranges[..., 0] < ranges[..., 1]).unbind(-1)
                if not bool((is_first & is_second).any()):
                    positions = torch.where(is_first, positions - skipped, positions)
                    ranges = torch.where(is_first[..., None], ranges[:, :, 0], ranges[:, :, 1])
                    skipped = None
            self._within[key] = KeyRanges(
                ranges, self.kv_length, skipped=skipped, positions=positions
            )
        return self._within[key]

    def whole(self, dropped: int = 0) -> Tensor:
        """The ranges in slots of unsharded keys, which begin with slot `kv_offset + dropped`."""
        first = self.kv_offset + dropped
        return self._once((first,), lambda: (self.ranges - first).clamp_(min=0))

    def check_not_padded(self, name: str) -> None:
        """Raises NotImplementedError where a row has padding before its first token."""
        if not _holds((self.ranges[..., 0] == 0).all(), _PADDED.format(name), waits=True):
            raise NotImplementedError(f"tree_attention: {_PADDED.format(name)}")

    def key_slots(self, layout: ShardLayout, rank: int) -> Tensor:
        """The global slots of all keys of `rank`, int32, computed once for all layers."""

        def slots() -> Tensor:
            return layout.local_slots(rank, 0, self.kv_length).to(self.ranges.device)

        return self._once(("slots", layout, rank), slots)

    def in_ring(
        self, layout: ShardLayout, rank: int, keys: Tensor, size: int
    ) -> tuple[Tensor, Tensor]:
        """The ranges in pages of `size` local slots, and each sequence's page table, which goes
        round the pages of its `keys` from where the first query's range begins."""
        batch, num_heads, num_slots, _ = keys.shape
        key, number = (layout, rank, size, batch, num_heads, num_slots), num_slots // size
        if key not in self._in_rings:
            first = layout.count(rank, self.ranges[..., 0].flatten(1).amin(1))[:, None] // size
            begins = (first * size).view(batch, *[1] * (self.ranges.dim() - 1))
            ranges = layout.count(rank, self.ranges) - begins
            pages, rows = (torch.arange(n, device=keys.device) for n in (number, batch))
            table = (first + pages) % number + rows[:, None] * (number * num_heads)
            self._in_rings[key] = ranges.to(torch.int32), table.to(torch.int32)
        return self._in_rings[key]

    def _once(self, key: tuple[object, ...], ranges: Callable[[], Tensor]) -> Tensor:
        """The ranges in int32, computed once for all layers."""
        if key not in self._known:
            self._known[key] = ranges().to(torch.int32)
        return self._known[key]

    @cached_property
    def first(self) -> int:
        """The first slot that any query sees."""
        return int(self.ranges[..., 0].min())

    @property
    def positions(self) -> Tensor:
        """The slot of each query that is no padding, from which ALiBi counts back, int64 [batch,
        seqlen_q]; to keys before a hole it is `skipped` less."""
        if self._positions is None:
            ends = self.ranges[..., 1] - 1
            self._positions = ends if self.skipped is None else ends.amax(-1)
        return self._positions

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"tree_attention: an attention mask is a KeyRanges here, not a tensor with {name!r}; "
            "pass models the 2-D padding mask"
        )


def tree_attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | KeyRanges | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **_: Any,
) -> KeyRanges:
    """Builds the `KeyRanges` of causal attention under a sliding window and a padding mask.

    transformers calls it in place of `sdpa_mask`, once per forward pass and kind of mask. Queries
    are the global slots from `q_offset` on, which is a tensor where the cache has a fixed size and
    the host knows no length, and keys those from `kv_offset` on; keys beyond the queries are
    hidden. `attention_mask` is a padding mask `[batch, cached + new tokens]` or `[batch,
    kv_length]`, 0 for hidden slots, or what this function returned before the forward pass, which
    is returned again.
    """
    if isinstance(attention_mask, KeyRanges):
        return attention_mask
    # A decoding step with a cache of fixed size does not wait for a GPU.
    is_length_known = not isinstance(q_offset, Tensor)
    waits = is_length_known or q_length > 1 or torch.device(device).type == "cpu"
    split = current_token_split()
    if split is not None:  # the ranges of all ranks' tokens
        q_length, q_offset = split.length, split.begin
    begin_end = torch.arange(q_length, device=device).add_(q_offset)[:, None].repeat(1, 2)
    begin, end = begin_end.unbind(-1)  # views: [seqlen_q]
    end += 1
    if local_size is None:
        begin.zero_()
    else:
        begin.add_(1 - local_size).clamp_(min=0)
    unsupported = None
    if mask_function is not causal_mask_function:
        if use_vmap:
            unsupported = "a custom mask function has no form as a range of keys"
        else:
            agrees = _agrees(mask_function, begin, end, batch_size, kv_offset, kv_length)
            if not _holds(agrees, _NO_RANGE, waits):
                unsupported = _NO_RANGE
    ranges, skipped = begin_end.expand(batch_size, q_length, 2), None
    if attention_mask is not None and unsupported is None:
        unsupported = _refuse_padding(
            attention_mask, batch_size, (q_offset + q_length, kv_offset + kv_length), waits
        )
        if unsupported is None:
            first, last, has_holes = _visible_run(attention_mask)
            if _holds(~has_holes, _HOLE, waits):
                ranges = torch.stack(
                    (torch.maximum(begin, first[:, None]), torch.minimum(end, last[:, None])), -1
                )
            else:
                unsupported = _refuse_holes(attention_mask, q_offset)
                ranges, skipped = _around_holes(attention_mask, begin_end, local_size)
                if unsupported is None and kv_offset > 0:
                    unsupported = _refuse_dropped(ranges, kv_offset)
    return KeyRanges(ranges, kv_length, kv_offset, unsupported, local_size, skipped)


def _refuse_padding(
    attention_mask: Tensor, batch_size: int, widths: tuple[int | Tensor, int], waits: bool
) -> str | None:
    """Why a padding mask has not the shape of its batch, or None. `widths` are the two that it may
    have: up to the last query, and up to the last key."""
    width, (queries, keys) = attention_mask.shape[-1], widths
    is_wide = width == keys
    if not is_wide:
        is_wide = width == queries
        if isinstance(is_wide, Tensor):
            is_wide = _holds(is_wide, _WIDTH, waits)
    if is_wide and attention_mask.dim() == 2 and len(attention_mask) == batch_size:
        return None
    return f"{_WIDTH} = {[batch_size, int(queries)]}, got {list(attention_mask.shape)}"


def _visible_run(attention_mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The first visible slot of each row, the end of these, and whether one has a hole there."""
    visible = attention_mask.to(torch.uint8)
    count = attention_mask.sum(-1)
    first = visible.argmax(-1)
    last = visible.shape[-1] - visible.flip(-1).argmax(-1)
    has_holes = ((last - first != count) & (count > 0)).any()
    return first, first + count, has_holes


def _around_holes(
    attention_mask: Tensor, begin_end: Tensor, window: int | None
) -> tuple[Tensor, Tensor]:
    """The ranges before and after the hole of each row `[batch, seqlen_q, 2, 2]`, and the slots
    of the hole before each query. A row without a hole has an empty range in front."""
    runs = _runs(attention_mask)  # [batch, 2, 2]
    (_, hole_begin), (hole_end, _) = (x.unbind(-1) for x in runs.unbind(1))
    begin, end = begin_end.unbind(-1)
    before = end - 1 - hole_begin[:, None]
    skipped = torch.minimum(before.clamp(min=0), (hole_end - hole_begin)[:, None])
    if window is not None:
        # A window that reaches over the hole has as many tokens as one that does not.
        unclamped = end - window
        begin = torch.where(unclamped < hole_end[:, None], unclamped - skipped, unclamped)
    begins = torch.maximum(begin[..., None], runs[:, None, :, 0])
    return torch.stack((begins, torch.minimum(end[:, None], runs[:, None, :, 1])), -1), skipped


def _runs(attention_mask: Tensor) -> Tensor:
    """The runs of ones of each row, int64 `[batch, 2, 2]`; an only one is the second."""
    visible = attention_mask != 0
    begins = visible & ~torch.nn.functional.pad(visible, (1, 0))[:, :-1]
    numbers = begins.cumsum(-1) * visible  # 1 in the first run, 2 in the second
    firsts = torch.stack([(numbers == i).to(torch.uint8).argmax(-1) for i in (1, 2)], -1)
    counts = torch.stack([(numbers == i).sum(-1) for i in (1, 2)], -1)
    runs = torch.stack((firsts, firsts + counts), -1)
    # The empty one in front begins where the only one does, as no query may see slots before.
    only = torch.stack((firsts[:, :1].expand(-1, 2), runs[:, 0]), 1)
    return torch.where((counts[:, 1] > 0)[:, None, None], runs, only)


def _refuse_holes(attention_mask: Tensor, num_cached: int | Tensor) -> str | None:
    """Refuses rows with several holes."""
    if isinstance(num_cached, Tensor) and attention_mask.device.type != "cpu":
        return _HOLE_IN_FIXED  # later steps would not know that there is one
    visible = torch.nn.functional.pad(attention_mask != 0, (1, 0))
    if int((visible[:, 1:] & ~visible[:, :-1]).sum(1).max()) <= 2:  # runs of ones
        return None
    found = {row: holes[1] for row, holes in _holes(attention_mask).items() if len(holes) > 1}
    return _describe_hole(
        "have at most one hole, zeros between ones", "a second hole", found, int(num_cached)
    )


def _refuse_dropped(ranges: Tensor, kv_offset: int) -> str | None:
    """Refuses queries that see keys before the first one that the caller's own cache keeps."""
    if int(ranges[..., 0].min()) >= kv_offset:
        return None
    return (
        "the padding mask of a row has a hole, and after it a sliding window sees slots before "
        f"{kv_offset}, with which the keys given begin: use a TreeCache"
    )


def longest_hole(attention_mask: Tensor) -> int:
    """The largest number of zeros between two ones of a row."""
    holes = (hole for row in _holes(attention_mask).values() for hole in row)
    return max((end - begin for begin, end in holes), default=0)


def check_steps_after(attention_mask: Tensor, num_cached: int, is_given: bool) -> None:
    """Raises NotImplementedError if steps after a padding mask cannot be right: after prompts that
    are padded on the right, or where nobody gave the mask that hides tokens of the text."""
    followed = torch.nn.functional.pad(attention_mask, (0, 1), value=1)
    found = _holes(followed)
    if is_given:
        width = attention_mask.shape[1]
        found = {row: holes[-1:] for row, holes in found.items() if holes[-1][1] == width}
    if found:
        first = {row: holes[0] for row, holes in found.items()}
        words = _describe_hole("end with its last token", "a hole", first, num_cached)
        raise NotImplementedError(f"generate: {words}")


def _holes(attention_mask: Tensor) -> dict[int, list[tuple[int, int]]]:
    """The holes of the rows that have some: the first column of zeros, and the next one of ones."""
    visible = attention_mask.to(device="cpu") != 0
    steps = visible.to(torch.int8).diff(dim=1)  # -1 where ones end, 1 where they begin
    ends, begins = steps == -1, steps == 1
    found = dict[int, list[tuple[int, int]]]()
    for row in (begins & (ends.cumsum(1) > 0)).any(1).nonzero()[:, 0].tolist():
        first, *_ = ends_of = (ends[row].nonzero()[:, 0] + 1).tolist()
        after = [i for i in (begins[row].nonzero()[:, 0] + 1).tolist() if i > first]
        found[row] = list(zip(ends_of, after, strict=False))
    return found


def _describe_hole(rule: str, what: str, found: dict[int, tuple[int, int]], num_cached: int) -> str:
    """Describes the hole of the first row: its place, its cause, and what to do about it."""
    row, (begin, end) = next(iter(found.items()))
    others = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    where = f"row {row}{others} has {what}, zeros at columns {begin} to {end - 1} between ones"
    if 0 < num_cached >= begin:  # the last token of a turn is not in the cache
        cause = (
            f"these are tokens of before, as the cache holds {num_cached}: if prompts were padded "
            "on the right, pad them on the left, tokenizer.padding_side = 'left'; if the row "
            "ended early in a turn before, go on with each such row alone, in a copy.deepcopy of "
            f"the cache: cache.batch_select_indices([{row}]), take back the tokens from column "
            f"{begin} on with cache.crop, and generate from the row's own tokens; or give the "
            "whole texts of all rows, padded on the left, without a cache"
        )
    else:
        cause = (
            "these are tokens of the prompt: if no attention_mask was given, transformers made "
            "this one of the pad tokens in the prompt, and where these are text, as an end of text "
            "between documents, pass attention_mask=torch.ones_like(input_ids); if they are "
            "padding, pad on the left alone, tokenizer.padding_side = 'left'"
        )
    return f"the padding mask of each row must {rule}, but {where}; {cause}"


def _agrees(
    mask_function: Callable[..., Tensor],
    begin: Tensor,
    end: Tensor,
    batch_size: int,
    kv_offset: int,
    kv_length: int,
) -> Tensor:
    """True where `mask_function` is true inside [begin, end) and false outside."""
    # It is evaluated at the range's four edges and in its middle only, O(batch * seqlen_q) in place
    # of a full mask. Every mask of transformers that is no such range (chunked, packed, blockwise,
    # bidirectional) differs at one of these places.
    probes = torch.stack((begin - 1, begin, (begin + end) // 2, end - 1, end), dim=-1)
    probes = probes.clamp_(kv_offset, kv_offset + kv_length - 1)
    expected = (begin[:, None] <= probes) & (probes < end[:, None])
    rows = torch.arange(batch_size, device=begin.device)[:, None, None]
    seen = mask_function(rows, rows.new_zeros(1), (end - 1)[:, None], probes)
    return (seen == expected).all()


def _holds(condition: Tensor, otherwise: str, waits: bool) -> bool:
    """True if the tensor is true. A compiled graph, which cannot ask, raises later if it is not."""
    if torch.compiler.is_compiling() or not waits:
        torch._assert_async(condition, f"tree_attention: {otherwise}")
        return True
    return bool(condition)


AttentionMaskInterface.register("tree_attention", tree_attention_mask)
