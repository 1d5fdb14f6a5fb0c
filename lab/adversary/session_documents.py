# SPDX-License-Identifier: BSD-3-Clause
"""What rows do that share a session's sequence as their document: they are made, asked, cropped,
asked again, mixed, copied and dropped in random order, while the session goes on."""

from __future__ import annotations

import copy
from random import Random

import torch
from torch import Tensor

from hf_models import PAD, VOCAB_SIZE
from tree_attention import hf

from . import model as truth
from . import session_caches as caches
from .conversation import MAX_LENGTH, Conversation
from .outcome import attempt
from .session_operations import MOST_NEW_TOKENS, forward, turn

_LONGEST_QUESTION = 30
_MOST_CACHES = 4
_ACTS = ("share", "ask", "ask", "again", "mix", "copy", "drop", "go on")


def documents(session: Conversation, rng: Random) -> str:
    asking, said = list[tuple[Conversation, int]](), list[str]()
    is_document = session.length > 0 and len(session.ids) == 1
    if rng.random() < 0.9 and not (is_document and session.cache.max_length is None):
        _take_one_sequence(session)
        said.append(forward(session, rng))
    # A mistake shows when rows are asked, and one of going back when they are asked again.
    acts = ["share", "ask", "again", "ask", *rng.choices(_ACTS, k=rng.randint(1, 5))]
    for act in acts:
        if act == "share" or not asking:
            shared = _share(session, rng)
            asking += [] if shared is None else [(shared, session.length)]
        elif act == "go on":
            if rng.random() < 0.5:  # its next tokens must leave what the rows read
                said.append(caches.crop(session, rng))
            said.append(forward(session, rng))
        else:
            number = rng.randrange(len(asking))
            rows, length = asking[number]
            if act == "ask":
                said.append(_ask(rows, length, rng))
            elif act == "again":
                _go_back(rows, length, rng)
            elif act == "mix":
                said.append(rng.choice([caches.reorder, caches.repeat])(rows, rng))
            elif act == "copy":
                other = copy.copy(rows)
                other.cache = copy.deepcopy(rows.cache)
                asking.append((other, length))
            else:
                del asking[number], rows
        del asking[:-_MOST_CACHES]
    said += [_ask(rows, length, rng) for rows, length in asking]
    session.keep(session.ids, session.mask)
    return " ".join(said)


def _take_one_sequence(session: Conversation) -> None:
    """In an empty cache that can be shared."""
    session.cache_options = session.cache_options | {"max_length": None}
    layout = session.cache.shard.layout
    session.cache = hf.TreeCache(
        session.model.config, session.comm, layout, **session.cache_options
    )
    session.empty(batch=1)


def _share(session: Conversation, rng: Random) -> Conversation | None:
    """Rows behind all tokens of the session, or None where that is refused."""
    batch = rng.choice([0, 1, 2, 2, 3, 3, 4, 4])
    outcome = attempt(session.cache.share, batch)
    is_possible = batch > 0 and session.length > 0 and session.cache.max_length is None
    if not is_possible or len(session.ids) > 1:
        outcome.refusal(("TreeCache",), (ValueError,))
        return None
    rows = copy.copy(session)
    rows.cache = outcome.result()
    rows.keep(*(x.repeat(batch, 1) for x in (session.ids, session.mask)))
    return rows


def _ask(rows: Conversation, document: int, rng: Random) -> str:
    """Rows go on with tokens of their own; right behind the document some are padded in front."""
    batch, count = len(rows.ids), rng.choice([1, 9, 9, _LONGEST_QUESTION])
    generator = torch.Generator().manual_seed(rng.getrandbits(31))
    new = torch.randint(3, VOCAB_SIZE, (batch, count), generator=generator)
    mask = torch.ones_like(new)
    # Indices that choose keys see around no hole, and windows around what their margin leaves.
    is_chosen_from = any(layer.index_columns for layer in rows.cache.kv_layers)
    reached = max(rows.reached, rows.length + count + MOST_NEW_TOKENS)
    sees_around = not rows.forgets or reached - document + count <= caches.MARGIN
    if rows.length == document and sees_around and not is_chosen_from:
        for row in range(batch):
            hole = rng.randrange(count)
            new[row, :hole], mask[row, :hole] = PAD, 0
    ids, mask = torch.cat([rows.ids, new], 1), torch.cat([rows.mask, mask], 1)
    if ids.shape[1] > MAX_LENGTH:
        return "too long"
    if rng.random() < 0.5:
        return turn(rows, rng, ids, mask)
    found: Tensor = rows.feed(ids, mask, logits_to_keep=1).logits
    rows.check(found, ids, mask)
    rows.keep(ids, mask)
    return truth.bits(found)


def _go_back(rows: Conversation, document: int, rng: Random) -> None:
    """To the end of the document, or to a token behind it; not into it."""
    if rows.cache.is_shared:
        into = attempt(rows.cache.crop, document - 1 - rows.length)
        into.refusal(("TreeCache",), (ValueError,))
    length = rng.randint(document, rows.length)
    if not rows.mask[:, length - 1].all():  # in the padding of a question
        length = document
    outcome = attempt(rows.cache.crop, length - rows.length)
    if outcome.error is not None:
        assert rows.forgets and rows.reached - length > caches.MARGIN, outcome
        outcome.refusal(("crop",), (ValueError,))
        return
    rows.keep(rows.ids[:, :length], rows.mask[:, :length])
