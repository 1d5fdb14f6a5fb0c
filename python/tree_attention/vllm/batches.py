# SPDX-License-Identifier: BSD-3-Clause
"""Steps of an engine as calls of `lean_decode`: requests of any lengths, end to end.

A step has a line of tokens. Requests with one token come first; they are one call, a sequence each.
The others are a second call: a sequence each if they have equally many tokens, as a single request
has, and else in blocks of `BLOCK` tokens, the last of a request filled up with queries that see no
key. There is no loop over requests, and padding is at most BLOCK - 1 tokens of each.

Requests with one token that begin with the same pages read them once (`cascade_decode`). Requests
with more tokens do not: their call takes as long as its arithmetic, which this does not lessen.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..cascade import PageGroup, cascade_decode, page_groups
from ..ops import lean_decode
from ..options import AttentionOptions
from ..sharding import BlockCyclic

BLOCK = 64
LayoutAndRank = tuple[BlockCyclic, int]  # the keys of each sequence in the cache of this rank


@dataclass(frozen=True)
class Batch:
    """One call: the tokens `[begin, end)` of the line as queries `[batch, seqlen_q]`."""

    begin: int
    end: int
    pages: Tensor  # int32 [batch, pages]
    ends: Tensor  # int64 [batch, seqlen_q]: how many keys of its sequence a query sees
    # Where tokens and queries are not one to one: int64 [batch * seqlen_q], the token of each query
    # and, bool, whether it is there for the token and not as padding.
    sources: Tensor | None = None
    is_token: Tensor | None = None
    _ranges: dict[object, Tensor] = field(default_factory=dict)
    _groups: dict[object, tuple[PageGroup, ...]] = field(default_factory=dict)

    def key_ranges(self, window: int | None, shard: LayoutAndRank | None) -> Tensor:
        """int32 `[batch, seqlen_q, 2]`; kept, as the layers of a model ask for the same."""
        found = self._ranges.get((window, shard))
        if found is None:
            ends = self.ends
            begins = torch.zeros_like(ends) if window is None else (ends - window).clamp(min=0)
            ranges = torch.stack((begins, ends), dim=-1)
            if shard is not None:
                layout, rank = shard
                ranges = layout.count(rank, ranges)
            found = self._ranges[window, shard] = ranges.int()
        return found

    def groups(
        self, num_heads_q: int, k: Tensor, shard: LayoutAndRank | None
    ) -> tuple[PageGroup, ...]:
        """The pages that requests with one token have in common; kept as `key_ranges` are."""
        if self.ends.shape[1] > 1:
            return ()
        _, num_heads_kv, page_size, head_dim = k.shape
        has_8_bits = k.element_size() == 1
        key = num_heads_q, k.shape[1:], has_8_bits, shard
        found = self._groups.get(key)
        if found is None:
            ends = self.key_ranges(None, shard)[:, 0, 1]
            num_pages = (-(-ends // page_size)).tolist()
            # Tables are as wide as the longest context of the engine.
            pages = self.pages[:, : max(num_pages, default=0)]
            found = self._groups[key] = page_groups(
                pages,
                num_pages,
                page_size,
                num_heads_q=num_heads_q,
                num_heads_kv=num_heads_kv,
                head_dim=head_dim,
                has_8_bits=has_8_bits,
            )
        return found

    def queries(self, line: Tensor) -> Tensor:
        """`[tokens, heads, ...]` as `[batch, heads, seqlen_q, ...]`, a view where it can be."""
        run = line[self.begin : self.end]
        if self.sources is not None:
            run = run[self.sources]
        return run.unflatten(0, self.ends.shape).transpose(1, 2)


def batches_of(
    query_starts: Tensor, seq_lens: Tensor, pages: Tensor, num_tokens: int, max_query_len: int
) -> list[Batch]:
    """The calls of a step: `query_starts [requests + 1]` says where in the line of `num_tokens` a
    request's tokens begin, at most `max_query_len`; `seq_lens` counts its keys with the new ones.
    """
    num_requests = len(seq_lens)
    seq_lens = seq_lens.long()
    if max_query_len == 1 and num_tokens == num_requests:
        return [Batch(0, num_tokens, pages, seq_lens[:, None])]
    lens = query_starts.long().diff()
    longer = torch.nonzero(lens != 1).flatten().tolist()
    first = longer[0] if longer else num_requests
    batches = [Batch(0, first, pages[:first], seq_lens[:first, None])] if first else []
    if first < num_requests:
        batches.append(_several(first, lens[first:], seq_lens[first:], pages[first:]))
    return batches


def _several(begin: int, lens: Tensor, seq_lens: Tensor, pages: Tensor) -> Batch:
    """Requests of any numbers of tokens, the first of them at `begin`."""
    end = begin + int(lens.sum())
    shortest, longest = int(lens.min()), int(lens.max())
    if shortest == longest:
        return Batch(begin, end, pages, (seq_lens - lens)[:, None] + torch.arange(1, longest + 1))
    num_blocks = (lens + BLOCK - 1) // BLOCK
    request = torch.arange(len(lens)).repeat_interleave(num_blocks)
    block = torch.arange(len(request)) - (num_blocks.cumsum(0) - num_blocks)[request]
    token = block[:, None] * BLOCK + torch.arange(min(BLOCK, longest))  # of its request
    is_token = token < lens[request, None]
    source = (lens.cumsum(0) - lens)[request, None] + token
    seen = (seq_lens - lens)[request, None] + token + 1
    return Batch(
        begin,
        end,
        pages[request],
        torch.where(is_token, seen, 0),
        torch.where(is_token, source, 0).flatten(),
        is_token.flatten(),
    )


def attend(
    batches: list[Batch],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    *,
    window: int | None,
    shard: LayoutAndRank | None,
    is_cascade: bool,
    options: AttentionOptions,
) -> None:
    """Writes `o` and `lse [tokens, num_heads_q]`, the state of the line `q [tokens, num_heads_q,
    head_dim]` over pages `[pages, num_heads_kv, page_size, head_dim]`. With `window`, a query sees
    so many keys at most, its own the last. With `is_cascade`, pages that requests begin with in
    common are read once."""
    # A window's keys are the last ones, which requests have for themselves.
    is_cascade &= window is None
    for batch in batches:
        options["page_table"] = batch.pages
        if "alibi_slopes" in options:
            options["query_positions"] = (batch.ends - 1).clamp(min=0)
        queries, ranges = batch.queries(q), batch.key_ranges(window, shard)
        groups = batch.groups(q.shape[1], k, shard) if is_cascade else ()
        if groups:
            state = cascade_decode(
                queries, k, v, ranges, out_dtype=o.dtype, groups=groups, **options
            )
        elif batch.sources is None:
            out = batch.queries(o), batch.queries(lse)
            lean_decode(queries, k, v, ranges, out=out, **options)
            continue
        else:
            state = lean_decode(queries, k, v, ranges, out_dtype=o.dtype, **options)
        for whole, part in zip((o, lse), state, strict=True):
            line = part.transpose(1, 2).flatten(0, 1)
            is_token = batch.is_token
            whole[batch.begin : batch.end] = line if is_token is None else line[is_token]
