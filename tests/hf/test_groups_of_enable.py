# SPDX-License-Identifier: BSD-3-Clause
"""Process groups that are made after `enable`, or destroyed, and weights that others have split."""

from __future__ import annotations

import os
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from distributed import run_ranks

pytest.importorskip("transformers")

from hf_models import make_model
from ranks_of_commands import started
from tree_attention import hf

GREEDY = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}

# Two processes that meet late, end their group and meet again.
_LATE = """
import os, sys, torch, torch.distributed as dist
from hf_models import make_model, make_prompts
from tree_attention import BlockCyclic, Communicator, ExchangeError, hf
from tree_attention.exchange import get_communicator
GREEDY = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
torch.set_grad_enabled(False)
rank, prompts = int(sys.argv[1]), make_prompts()
expected = make_model("llama").generate(**prompts, **GREEDY)

def meet(name):
    store = dist.FileStore(sys.argv[2] + name, 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)

def refused(sentence, run):
    try:
        run()
    except ExchangeError as error:
        assert sentence in str(error), error
    else:
        raise AssertionError(sentence)

early, split = hf.enable(make_model("llama")), hf.enable(hf.parallelize(make_model("llama")))
cache, comms = hf.TreeCache(early.config), (Communicator(), get_communicator())
meet("first")
before = "made before init_process_group, for this rank alone, and now there are 2 ranks; call "
for model in early, split:
    refused(f"enable: it was {before}enable", lambda: model.generate(**prompts, **GREEDY))
plain = make_model("llama", "tree_attention")
refused("TreeCache: it was " + before, lambda: plain(**prompts, **{hf.CACHE_NAME: cache}))
for comm in comms:
    refused("Communicator: it was " + before, lambda: comm.all_reduce(torch.ones(2)))
assert torch.equal(hf.enable(early).generate(**prompts, **GREEDY), expected)
try:
    early.generate(**prompts, **GREEDY, **{hf.CACHE_NAME: cache})
except ValueError as error:
    assert "cache is for a world of 1 and the model was enabled for one of 2" in str(error), error
else:
    raise AssertionError("a cache of another world was taken")
hf.enable(early, layout=BlockCyclic(2, 16))
other = hf.enable(make_model("llama"))
for model in early, other:
    assert torch.equal(model.generate(**prompts, **GREEDY), expected)
dist.destroy_process_group()
gone = "enable: its process group of 2 ranks was destroyed; call enable again"
for model in early, other:
    refused(gone, lambda: model.generate(**prompts, **GREEDY))
meet("second")
for model in early, other:
    refused(gone, lambda: model.generate(**prompts, **GREEDY))
    assert torch.equal(hf.enable(model).generate(**prompts, **GREEDY), expected)
dist.destroy_process_group()

# A world of one, and one of two after it.
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
assert torch.equal(hf.enable(other).generate(**prompts, **GREEDY), expected)
dist.destroy_process_group()
meet("third")
refused(f"enable: it was {before}enable", lambda: other.generate(**prompts, **GREEDY))
dist.destroy_process_group()
"""


@pytest.mark.deep
def test_groups_made_late_and_destroyed(tmp_path: Path) -> None:
    """Both ends of a group's life, of which nothing told: each rank by itself, or another error."""
    with ExitStack() as processes:
        ranks = [
            processes.enter_context(started([str(rank), f"{tmp_path}/"], 0, program=_LATE))
            for rank in range(2)
        ]
        for rank in ranks:
            ended = rank.wait_for_end(0)
            assert ended.status == 0, ended.stderr


def test_torchrun_without_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    from tree_attention.hf.enable import _warn_once as once

    for size, number in (("2", 1), ("1", 0), ("", 0), ("two", 0)):
        once.cache_clear()
        monkeypatch.setenv("WORLD_SIZE", size)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                hf.enable(make_model("llama"))
        found = [x for x in caught if "WORLD_SIZE" in str(x.message)]
        messages = [str(x.message) for x in found]
        assert {x.filename for x in found} <= {__file__}
        assert len(messages) == number
        for message in messages:
            assert message.startswith("enable: WORLD_SIZE is 2 and torch.distributed is not init")
    once.cache_clear()


def _initialised(rank: int, world_size: int) -> None:
    os.environ["WORLD_SIZE"] = str(world_size)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hf.enable(make_model("llama"))


def test_a_process_group_is_not_warned_about() -> None:
    run_ranks(_initialised, 2)


_WAY = r"load the model with tree_attention.hf.from_pretrained\(path, tensor_parallel_size"


def _splits(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    for functions in ((hf.enable, "enable"), (hf.parallelize, "parallelize")):
        function, op = functions
        model = make_model("llama")
        parallelize_module(model.model.layers[0].mlp, mesh, {"up_proj": ColwiseParallel()})
        with pytest.raises(
            ValueError, match=f"^{op}: .* split already: .*up_proj.*DTensor.*{_WAY}"
        ):
            function(model)
        model = make_model("llama")
        fully_shard(model, mesh=mesh)
        with pytest.raises(ValueError, match=f"^{op}: .* is a DTensor over 2 ranks, as.*{_WAY}"):
            function(model)
        assert "generate" not in vars(model)
    wrapped = nn.parallel.DistributedDataParallel(make_model("llama"))
    with pytest.raises(
        TypeError, match="DistributedDataParallel around a LlamaForCausalLM; enable"
    ):
        hf.enable(wrapped)


def test_weights_that_torch_has_split() -> None:
    run_ranks(_splits, 2)


@pytest.mark.parametrize("op", ["enable", "parallelize"])
def test_weights_that_others_have_split(op: str) -> None:
    """As far as these libraries mark them, which are not needed for it."""
    function: Any = getattr(hf, op)

    def refused(model: Any, sentence: str) -> None:
        with pytest.raises(ValueError, match=f"^{op}: .* are split already: {sentence}.*{_WAY}"):
            function(model)

    model = make_model("llama")
    model.model.norm.weight.ds_id = 3
    refused(model, "model.norm.weight belongs to DeepSpeed's ZeRO-3")
    model = make_model("llama")
    model.hf_device_map = {"model.embed_tokens": 0, "model.layers.0": 1, "lm_head": "cpu"}
    refused(model, "device_map spread its layers over 0, 1;")
    model.hf_device_map = {"": "cpu"}
    function(model)
    model = make_model("llama")
    model._tp_size = 2
    refused(model, "tp_plan of transformers split them over 2 ranks")


def test_offloaded_weights_and_adapters() -> None:
    model = make_model("llama")
    model.lm_head.weight = nn.Parameter(torch.empty(199, 64, device="meta"))
    with pytest.raises(ValueError, match=f"on the meta device, as where device_map.*{_WAY}"):
        hf.parallelize(model)

    class PeftModel(nn.Module):
        def merge_and_unload(self) -> None: ...

    with pytest.raises(TypeError, match=r"got PeftModel; enable what model.merge_and_unload\(\)"):
        hf.enable(PeftModel())
