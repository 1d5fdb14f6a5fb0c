# SPDX-License-Identifier: BSD-3-Clause
"""Weights that do not fit are refused on every rank before one of them allocates any.

The mistakes these tests are for: a rank that loads while another refuses, two ranks of one host of
which each takes all that is free for its own, bytes of weights before they are quantised, and
refusals of what fits.
"""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from distributed import run_ranks
from tiers import tiers_of

pytest.importorskip("transformers")

from split_models import make_model
from tree_attention import _memory, hf
from tree_attention.weights import load as loading
from tree_attention.weights import room

_LARGE = {"vocab_size": 512, "hidden_size": 96, "intermediate_size": 512}
_AMPLE = 1 << 40


@pytest.fixture(name="path")
def _path(tmp_path: Path) -> str:
    make_model("llama", **_LARGE).save_pretrained(tmp_path)
    return str(tmp_path)


def _free(own: int | None, shared: int | None, pool: str | None = "all") -> Any:
    return mock.patch.multiple(
        room,
        free_bytes=lambda device: own,
        shared_bytes=lambda: shared,
        pool_name=lambda: pool,
    )


def _refused(path: str, **options: Any) -> str:
    """The error of a load that fills no tensor."""
    filled = mock.patch.object(loading, "_fill", side_effect=AssertionError("it was filled"))
    with filled, pytest.raises(torch.OutOfMemoryError) as caught:
        hf.from_pretrained(path, **options)
    return str(caught.value)


def _bytes(path: str, **options: Any) -> int:
    return sum(x.nbytes for x in hf.from_pretrained(path, **options).parameters())


def _load(rank: int, world_size: int, path: str) -> tuple[int, str, str, str]:
    own = _bytes(path)
    with _free(own // 2 if rank == 1 else _AMPLE, _AMPLE):
        lacks = _refused(path)
    with _free(own // 2 if rank == 1 else _AMPLE, _AMPLE, pool=f"container {rank}"):
        apart = _refused(path)
    with _free(_AMPLE, own):  # room for one of them
        together = _refused(path)
    for pool in (f"container {rank}", None):
        with _free(own, own, pool):
            assert _bytes(path) == own
    with _free(own, world_size * own):
        assert _bytes(path) == own
    return own, lacks, apart, together


def test_one_rank_that_lacks_memory_is_an_error_on_all(path: str) -> None:
    found = run_ranks(_load, 2, path)
    sizes = [_memory.in_words(own) for own, *_ in found]
    both = _memory.in_words(sum(own for own, *_ in found))
    ways = (
        "take fewer bits (dtype='bfloat16' or weights='int8' or weights='int4'; on the command "
        "line --dtype or --weight-dtype), split them over ranks on more hosts, or take a host "
        "with more memory"
    )
    half = _memory.in_words(found[1][0] // 2)
    head = "from_pretrained: the weights of LlamaForCausalLM need"
    for _, lacks, apart, together in found:
        assert lacks == f"{head} {sizes[1]} of cpu on rank 1, and {half} are free; {ways}"
        assert re.sub(r"rank 1 \([^)]+\)", "rank 1", apart) == lacks and apart != lacks
        free = _memory.in_words(max(x for x, *_ in found))
        assert together == f"{head} {both} of cpu on ranks 0, 1, and {free} are free; {ways}"


@pytest.mark.parametrize(
    "name, weights",
    tiers_of(
        product(("llama", "gpt_oss"), (None, "int8", "int4")),
        [("llama", None), ("gpt_oss", "int4")],
    ),
)
def test_what_fits_is_not_refused(name: str, weights: str | None, tmp_path: Path) -> None:
    """Not with one byte to spare; and what is far from fitting is refused."""
    make_model(name, **_LARGE).save_pretrained(tmp_path)
    size = _bytes(str(tmp_path), weights=weights, dtype="bfloat16")
    with _free(size, size):
        assert _bytes(str(tmp_path), weights=weights, dtype="bfloat16") == size
    with _free(None, None):
        assert _bytes(str(tmp_path), weights=weights, dtype="bfloat16") == size
    with _free(3 * size // 4, _AMPLE):
        message = _refused(str(tmp_path), weights=weights, dtype="bfloat16")
    line = "; on the command line --weight-dtype"
    bits = {
        None: f"take fewer bits (weights='int8' or weights='int4'{line}), ",
        "int8": f"take fewer bits (weights='int4'{line}), ",
        "int4": "",
    }
    assert f" are free; {bits[weights]}split them over ranks" in message
    assert " of cpu, and " in message  # of one rank


def _pool(rank: int, world_size: int) -> str | None:
    return _memory.pool_name()


def test_processes_of_one_group_have_one_pool() -> None:
    own = _memory.pool_name()
    if own is None:
        pytest.skip("this system does not name its pools of memory")
    assert "/" in own
    assert run_ranks(_pool, 2) == [own, own]
