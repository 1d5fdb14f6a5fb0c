# SPDX-License-Identifier: BSD-3-Clause
"""Groups that come after what uses them, and groups that are gone: right, or refused in time."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from random import Random
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from hf_models import VOCAB_SIZE, make_model
from tree_attention import Communicator, hf, reference, tree_decode
from tree_attention.hf import CACHE_NAME

from . import model as truth
from .cases import Case, made_once
from .outcome import AMPLE, Outcome, attempt
from .places import Place

_SECONDS = 10.0  # of an exchange: an error comes long before
OWN_PROCESSES = True  # whose default group ends and begins anew
_NAMES = ("group", "groups", "init_process_group", "destroyed", "process group", "world", "rank",
          "layout")  # fmt: skip


def world_size(case: Case) -> int:
    return case.first.choice([1, 2, 2, 3])


@made_once
def _store() -> dist.Store:
    """That in which the ranks met, which outlives their groups."""
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    return store


def play(case: Case, rank: int) -> str:
    size = world_size(case)
    _store()
    if dist.is_initialized():
        dist.destroy_process_group()
    begun = [0]

    def begin() -> None:
        """As a program does, later than it should."""
        begun[0] += 1
        store = dist.PrefixStore(f"{case.seed} {case.index} {begun[0]}", _store())
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)

    with torch.no_grad():
        said = case.draw(KINDS)(case.rng, rank, size, begin)
    if not dist.is_initialized():
        begin()
    Place(rank, size, dist.group.WORLD, Communicator(timeout=AMPLE)).probe()
    return said


def _ids(rng: Random, rank: int, differs: bool) -> Tensor:
    generator = torch.Generator().manual_seed(rng.getrandbits(31) + (rank if differs else 0))
    return torch.randint(3, VOCAB_SIZE, (1, 12), generator=generator)


def _is_plains(outcome: Outcome, ids: Tensor) -> str:
    """Each rank has the tokens of its own prompt, or an error: never those of a mixture."""
    if outcome.error is not None:
        outcome.refusal(_NAMES)
        return type(outcome.error).__name__
    expected = _plain().generate(ids, max_new_tokens=5, min_new_tokens=5, do_sample=False)
    assert torch.equal(outcome.value, expected), "other tokens than transformers'"
    return "right"


@made_once
def _plain() -> Any:
    return make_model("llama")


def _generate(model: Any, ids: Tensor, **more: Any) -> Outcome:
    count = {"max_new_tokens": 5, "min_new_tokens": 5}
    return attempt(model.generate, ids, do_sample=False, **count, **more)


def enabled_before(rng: Random, rank: int, size: int, begin: Callable[[], None]) -> str:
    """A model, or a cache, of a program that makes its group afterwards."""
    model = make_model("llama")
    way = rng.choice(["enable", "TreeCache", "both"])
    differs = rng.random() < 0.5
    model = hf.enable(model, timeout=_SECONDS)
    cache = None if way == "enable" else hf.TreeCache(model.config)
    if rng.random() < 0.3:
        _is_plains(_generate(model, ids := _ids(rng, rank, False)), ids)
    begin()
    if way == "TreeCache":
        hf.enable(model, timeout=_SECONDS)
    ids = _ids(rng, rank, differs)
    more = {} if cache is None else {CACHE_NAME: cache}
    try:
        said = _is_plains(_generate(model, ids, **more), ids)
    except AssertionError as error:
        raise AssertionError(
            f"{way} before the group, prompts differ {differs}: {error}"
        ) from error
    # What to do is easy: enable it again.
    hf.enable(model, timeout=AMPLE)
    again = _ids(rng, rank, False)
    _is_plains(Outcome(0.0, _generate(model, again).result()), again)
    return said


def communicator_before(rng: Random, rank: int, size: int, begin: Callable[[], None]) -> str:
    """It stays one of a world of one and says so, or is refused: never a part for the whole."""
    comm = Communicator(timeout=_SECONDS)
    x = torch.full((3,), rank + 1.0)
    assert torch.equal(attempt(comm.all_reduce, x).result(), x)
    begin()
    outcome = attempt(comm.all_reduce, x)
    if outcome.error is not None:
        outcome.refusal(_NAMES)
        return type(outcome.error).__name__
    assert comm.world_size == 1 and torch.equal(outcome.value, x), "neither its own nor the sum"
    # A function that is given no group takes the one that there is now.
    torch.manual_seed(3)
    q, k = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 2 * size, 8)
    own = k[:, :, 2 * rank : 2 * rank + 2]
    found = attempt(tree_decode, q, own, own).result()
    expected = attempt(tree_decode, q, k, k, group=comm).result()
    error = (found[0] - expected[0]).abs().max().item()
    assert error < 1e-5, f"o is off by {error:.3g}"
    return truth.bits(*found)


def gone(rng: Random, rank: int, size: int, begin: Callable[[], None]) -> str:
    """The group is destroyed while a model, a cache and a communicator have it."""
    begin()
    of_its_own = rng.random() < 0.5
    group = dist.new_group(range(size)) if of_its_own else None
    comm = Communicator(group, _SECONDS)
    is_used = rng.random() < 0.7
    model = hf.enable(make_model("llama"), rng.choice([comm, group]), timeout=_SECONDS)
    ids = _ids(rng, rank, False)
    if is_used:
        _is_plains(Outcome(0.0, _generate(model, ids).result()), ids)
        attempt(comm.all_reduce, torch.ones(2)).result()
    if rng.random() < 0.3:
        dist.barrier(group)
    dist.destroy_process_group(group)
    is_back = rng.random() < 0.5 and not of_its_own
    if is_back:
        begin()
    total = torch.full((2,), size * (size + 1) / 2)
    torch.manual_seed(3)
    q, k = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 2 * size, 8)
    merged = reference.attention(q, k, k)[0].float()
    own = k[:, :, 2 * rank : 2 * rank + 2]
    # Ways of our own between ranks may outlive a group, and then all of them have the right result.
    calls: dict[str, Callable[[], tuple[Outcome, Tensor | None]]] = {
        "all_reduce": lambda: (attempt(comm.all_reduce, torch.full((2,), rank + 1.0)), total),
        "tree_decode": lambda: (attempt(tree_decode, q, own, own, group=comm), merged),
        "generate": lambda: (_generate(model, ids), None),
    }
    for name in rng.sample(list(calls), len(calls)):
        outcome, expected = calls[name]()
        try:
            if expected is None:
                _is_plains(outcome, ids)
            elif outcome.error is None:
                found = outcome.value if name == "all_reduce" else outcome.value[0]
                assert torch.allclose(found, expected, atol=1e-4), f"{found} for {expected}"
            else:
                outcome.refusal((*_NAMES, "failed", "communicator"))
        except AssertionError as error:
            raise AssertionError(f"{name} of a group that is gone: {error}") from error
    if not dist.is_initialized():
        begin()
    hf.enable(model, timeout=AMPLE)
    _is_plains(Outcome(0.0, _generate(model, ids).result()), ids)
    return "right or refused"


def launched(rng: Random, rank: int, size: int, begin: Callable[[], None]) -> str:
    """torchrun's variables without a group: each process is alone, and may be told so."""
    world = {"RANK": "0", "WORLD_SIZE": rng.choice(["1", "2", "8", "", "x"]), "LOCAL_RANK": "0"}
    with mock.patch.dict(os.environ, world), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = hf.enable(make_model("llama"))
        ids = _ids(rng, rank, False)
        _is_plains(Outcome(0.0, _generate(model, ids).result()), ids)
    ours = [str(w.message) for w in caught if "init_process_group" in str(w.message)]
    is_several = world["WORLD_SIZE"] in ("2", "8")
    # Once in a process, of whose models this one need not be the first.
    assert len(ours) <= is_several, f"WORLD_SIZE={world['WORLD_SIZE']}: it says {ours}"
    return "alone"


KINDS: dict[str, tuple[float, Callable[[Random, int, int, Callable[[], None]], str]]] = {
    "enabled_before": (3, enabled_before),
    "communicator_before": (1, communicator_before),
    "gone": (3, gone),
    "launched": (1, launched),
}
