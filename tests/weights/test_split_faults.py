# SPDX-License-Identifier: BSD-3-Clause
"""A rank that is lost while a split model loads or runs is an exception on every other, in time;
and the memory that loading needs.

The mistakes these tests are for: a wait without a deadline in one of a layer's exchanges, or in the
agreement after loading; a rank that reads the whole checkpoint into its memory.
"""

from __future__ import annotations

import gc
import math
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors import safe_open

from distributed import Lost, run_ranks
from tiers import tiers_of

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig

from faults import AMPLE, ROUND, SLACK, Once, before_operation
from split_models import make_model, make_prompts
from tree_attention import ExchangeError, hf
from tree_attention.weights import load as loading

TIMEOUT = 2.0
_LATE = 1.5  # seconds of a rank that answers in time
# What the ranks exchange in a forward pass of two layers, by number: embedding, two times merge,
# attention's sum and the MLP's, logits.
EXCHANGES = {"embedding": 0, "merge": 1, "sum": 2, "logits": 7}
DECODING = 8  # exchanges of the prefill

CASES = tiers_of(
    [
        (2, 1, "kill", "loading"),
        (3, 1, "stop", "loading"),
        (2, 1, "kill", "quantising"),
        (2, 1, "stop", "quantising"),
        (2, 1, "stop", "merge"),
        (4, 2, "kill", "merge"),
        (4, 2, "stop", "sum"),
        (2, 2, "kill", "logits"),
        (3, 1, "stop", "decoding merge"),
        (4, 2, "kill", "decoding sum"),
    ],
    quick=[(2, 1, "stop", "merge")],
)


def _lose(how: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)


def _run(
    rank: int, world_size: int, path: str, size: int, how: str, where: str, victim: int
) -> tuple[float, str]:
    """Seconds from the last sign of life to the error, and the error."""
    # What is imported and set up once is, now, however long it takes.
    model = hf.from_pretrained(path, tensor_parallel_size=size, timeout=AMPLE)
    if where in ("loading", "quantising"):
        weights = "int8" if where == "quantising" else None
        load, remaining = loading.set_tensor, iter(range(9))

        def lost_in_loading(*args: Any) -> None:
            load(*args)
            if rank == victim and next(remaining, None) is None:
                _lose(how)

        with mock.patch.object(loading, "set_tensor", lost_in_loading):
            begin = time.monotonic()
            with pytest.raises(ExchangeError) as raised:
                hf.from_pretrained(
                    path, tensor_parallel_size=size, timeout=TIMEOUT, weights=weights
                )
            return time.monotonic() - begin, str(raised.value)
    prompts = make_prompts()
    model.generate(**prompts, max_new_tokens=4)
    hf.enable(model, timeout=TIMEOUT)
    stage, _, exchange = where.rpartition(" ")
    number = EXCHANGES[exchange] + (DECODING if stage else 0)
    lose = Once(ROUND * number, lambda: _lose(how) if rank == victim else None)
    with before_operation(lose):
        begin = time.monotonic()
        with pytest.raises(ExchangeError) as raised:
            model.generate(**prompts, max_new_tokens=4)
    assert lose.done
    return time.monotonic() - begin, str(raised.value)


@pytest.mark.parametrize("world_size, size, how, where", CASES)
def test_a_lost_rank(world_size: int, size: int, how: str, where: str, tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path)
    victim = world_size - 1
    results = run_ranks(_run, world_size, str(tmp_path), size, how, where, victim, lost=[victim])
    assert isinstance(results.pop(victim), Lost)
    for seconds, message in results:
        assert seconds < TIMEOUT + SLACK, message


def _run_with_a_slow_rank(rank: int, world_size: int, path: str) -> tuple[list[int], float]:
    load, remaining = loading.set_tensor, iter(range(9))
    late = []

    def slow_in_loading(*args: Any) -> None:
        load(*args)
        if rank == 1 and next(remaining, None) is None and not late:
            late.append(rank)
            time.sleep(_LATE)

    with mock.patch.object(loading, "set_tensor", slow_in_loading):
        begin = time.monotonic()
        model = hf.from_pretrained(path, weights="int8", timeout=AMPLE)
        waited = time.monotonic() - begin
    sleep = Once(ROUND * (DECODING + EXCHANGES["merge"]), lambda: time.sleep(_LATE * rank))
    with before_operation(sleep):
        tokens = model.generate(**make_prompts(), max_new_tokens=4, do_sample=False)
    assert sleep.done and len(late) == rank
    return tokens.tolist(), waited


@pytest.mark.deep
def test_a_slow_rank_is_waited_for(tmp_path: Path) -> None:
    """While it loads and quantises, and while it decodes."""
    make_model("llama").save_pretrained(tmp_path)
    whole = hf.from_pretrained(tmp_path, weights="int8")
    tokens = whole.generate(**make_prompts(), max_new_tokens=4, do_sample=False)
    for found, waited in run_ranks(_run_with_a_slow_rank, 2, str(tmp_path)):
        assert found == tokens.tolist() and waited > _LATE


def _anonymous_bytes() -> int:
    """Memory of this process that no file backs."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def _peak(rank: int, world_size: int, path: str, weights: str | None) -> tuple[int, int]:
    """How far memory rose while the model was loaded, and the size of its parts."""
    hf.from_pretrained(path, weights=weights)  # what is imported and set up once is, now
    gc.collect()
    begin = peak = _anonymous_bytes()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.001):
            peak = max(peak, _anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    model = hf.from_pretrained(path, weights=weights)
    done.set()
    watcher.join()
    return peak - begin, sum(parameter.nbytes for parameter in model.parameters())


_LARGE = {"vocab_size": 8192, "hidden_size": 480, "intermediate_size": 4096}


def _large_mixture() -> PreTrainedModel:
    config = Qwen3MoeConfig(
        # One tensor of 4 MB: far above what an allocator keeps, far below the experts of a layer.
        **{"vocab_size": 4096, "hidden_size": 256, "num_hidden_layers": 2, "head_dim": 32},
        **{"num_attention_heads": 8, "num_key_value_heads": 2, "moe_intermediate_size": 256},
        **{"num_experts": 32, "num_experts_per_tok": 4, "tie_word_embeddings": False},
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


@pytest.mark.deep
@pytest.mark.parametrize(
    ("max_shard_size", "kind", "weights"),
    [
        ("1GB", "dense", None),
        ("20MB", "experts", "int4"),
        *(("1GB", "experts", weights) for weights in (None, "int4")),
        *(("20MB", "dense", weights) for weights in (None, "int8", "int4")),
    ],
)
def test_loading_takes_the_memory_of_the_parts(
    tmp_path: Path, max_shard_size: str, kind: str, weights: str | None
) -> None:
    """Of single files and sharded ones, and with experts one by one: no more than the parts and one
    tensor of the file."""
    model = make_model("llama", **_LARGE) if kind == "dense" else _large_mixture()
    whole = sum(parameter.nbytes for parameter in model.parameters())
    model.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    largest = max(
        math.prod(file.get_slice(name).get_shape()) * 4
        for path in tmp_path.glob("*.safetensors")
        for file in [safe_open(path, framework="pt")]
        for name in file.keys()  # noqa: SIM118
    )
    del model
    share = {None: 0.56, "int8": 0.3, "int4": 0.3}[weights]
    for peak, parts in run_ranks(_peak, 2, str(tmp_path), weights, fresh=True):
        assert parts < share * whole
        # A tensor is read in float32, as all of the file are here, a part of it at a time.
        assert peak < parts + largest
