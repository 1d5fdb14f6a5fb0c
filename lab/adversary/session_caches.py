# SPDX-License-Identifier: BSD-3-Clause
"""What a session does with its cache: tokens are taken back, rows change, slots move, files."""

from __future__ import annotations

import copy
from random import Random

import torch

from tree_attention import ShardLayout, hf

from .cases import draw_layout
from .conversation import MAX_LENGTH, ROOM, Conversation, communicator
from .outcome import attempt
from .session_models import group, shared_folder
from .session_operations import forward

MARGIN = 128  # tokens that layers with a sliding window can always give back


def crop(session: Conversation, rng: Random) -> str:
    beyond = rng.randint(min(MARGIN, session.length), session.length + 2)
    count = rng.choice([0, 1, 5, rng.randint(0, session.length + 2), beyond])
    outcome = attempt(session.cache.crop, -count)
    if outcome.error is not None:
        gone = session.reached - session.length + count  # since slots were dropped
        assert session.forgets and gone > MARGIN, f"crop(-{count}) was refused: {outcome.error}"
        outcome.refusal(("crop",), (ValueError,))
        session.keep(session.ids, session.mask)
        return "ValueError"
    kept = max(0, session.length - count)
    session.keep(session.ids[:, :kept], session.mask[:, :kept])
    if kept and not session.mask.any(1).all():  # rows of padding alone have nothing to attend to
        session.empty()
    return str(kept)


def reset(session: Conversation, rng: Random) -> str:
    session.empty(batch=rng.choice([1, 2, 3]))
    return "reset"


def _select(session: Conversation, rows: list[int]) -> str:
    session.keep(session.ids[rows], session.mask[rows])
    return str(rows)


def reorder(session: Conversation, rng: Random) -> str:
    batch = len(session.ids)
    rows = [rng.randrange(batch) for _ in range(batch)]
    session.cache.reorder_cache(torch.tensor(rows))
    return _select(session, rows)


def repeat(session: Conversation, rng: Random) -> str:
    if len(session.ids) > 3:
        rows = [rng.randrange(len(session.ids)) for _ in range(2)]
        session.cache.batch_select_indices(torch.tensor(rows))
        return _select(session, rows)
    session.cache.batch_repeat_interleave(2)
    return _select(session, [row for row in range(len(session.ids)) for _ in range(2)])


def branch(session: Conversation, rng: Random) -> str:
    """What is done to a copy does nothing to the cache that was copied."""
    kept = copy.copy(session)
    layout = session.cache.shard.layout
    session.cache = copy.deepcopy(session.cache)
    said = forward(session, rng) + rng.choice([crop, reset, reorder, reshard])(session, rng)
    if rng.random() < 0.7:
        session.cache, session.ids, session.mask = kept.cache, kept.ids, kept.mask
        session.reached = kept.reached
        session.move(layout)
    return said


def reshard(session: Conversation, rng: Random) -> str:
    layout = session.draw_layout(rng)
    session.cache.reshard(layout)
    session.move(layout)
    session.keep(session.ids, session.mask)
    return str(layout)


def _of(session: Conversation, folder: str) -> str:
    """A tensor group's ranks have other heads each, and the ranks of a context group a folder."""
    return f"{folder}/{hf.mesh(session.model).tensor_rank if session.is_split else 0}"


def restore(session: Conversation, rng: Random) -> str:
    """The conversation goes on with what was saved, in another layout or size."""
    layout = rng.choice([session.cache.shard.layout, session.draw_layout(rng)])
    options = session.cache_options | {
        "max_length": rng.choice([None, ROOM]),
        "growth": rng.choice([1, 64, 1024]),
    }
    if not session.length:
        return "nothing to save"
    with shared_folder(session.world_size) as folder:
        path = _of(session, str(folder))
        for _ in range(rng.choice([1, 1, 2])):  # a second save replaces the first
            session.cache.save(path)
        arguments = (path, session.model.config, session.comm, layout)
        outcome = attempt(hf.TreeCache.load, *arguments, **options)
    session.cache, session.cache_options = outcome.result(), options
    session.move(layout)
    session.keep(session.ids, session.mask)
    return f"{layout} {options['max_length']}"


def restore_elsewhere(session: Conversation, rng: Random) -> str:
    """Fewer ranks, in a layout of their own, go on from what all have saved."""
    count = rng.randint(1, session.world_size)
    layout: ShardLayout = draw_layout(rng, count, ROOM)
    ids, mask = session.draw_tokens(rng, padded=False)
    keep = rng.choice([0, 1])
    if session.is_split or not session.length or ids.shape[1] > MAX_LENGTH:
        return "not now"
    group(count)  # all ranks make it
    with shared_folder(session.world_size) as folder:
        session.cache.save(folder)
        if session.cache.shard.rank < count:
            options = session.cache_options | {"max_length": None}
            there = copy.copy(session)
            there.cache = hf.TreeCache.load(
                folder, session.model.config, communicator(count), layout, **options
            )
            there.check(there.feed(ids, mask, logits_to_keep=keep).logits, ids, mask)
            there.keep(ids, mask)
    session.keep(session.ids, session.mask)
    return f"{count} ranks"
