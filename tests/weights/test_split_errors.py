# SPDX-License-Identifier: BSD-3-Clause
"""What cannot be split or loaded is a sentence, the same on every rank, and nobody is left waiting.

The mistakes these tests are for: a rank that raises alone while others wait for it, a damaged file
that becomes random weights, a split model that is saved as if it were whole.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file

from distributed import on_ranks, run_ranks

pytest.importorskip("transformers")

from split_models import make_model, make_prompts
from tree_attention import BlockCyclic, ExchangeError, hf
from tree_attention.exchange import Communicator
from tree_attention.hf import CACHE_NAME

BAD = (2, 0, -1, 6)
PROMPT = {"max_new_tokens": 3, "do_sample": False}
NUMBERS = " must be an integer from 0 to 1,024 for each of 3 ranks, and not all 0, got "
BAD_SHARES: list[tuple[type[Exception], str, object]] = [
    *((ValueError, NUMBERS, x) for x in ([1, 2], [0, 0, 0], [-1, 2, 3], [1, 1, 1025])),
    *((TypeError, NUMBERS, x) for x in ([3.0, 1, 1], [True, 1, 1], [math.nan, 1, 1])),
    (ValueError, r"\['cache'\]" + NUMBERS, {"cache": [1, 2]}),
    (TypeError, " must be 'auto', or an integer for each of 3 ranks, got 'fair'", "fair"),
    (ValueError, " must be of weights, cache, prompt, got 'keys'", {"keys": [3, 2, 1]}),
]


def nothing_sent() -> Any:
    """Every exchange begins so, as does every comparison of ranks."""
    return mock.patch.object(Communicator, "begin", side_effect=AssertionError("begun"))


def _arguments(rank: int, world_size: int, path: str) -> None:
    model = make_model("llama")
    split = hf.parallelize
    world = "tensor_parallel_size must divide the group's world size 3, got "
    refusals: list[tuple[type[Exception], str, Callable[[], object]]] = [
        *((ValueError, world + str(n), partial(split, model, tensor_parallel_size=n)) for n in BAD),
        *(
            (ValueError, world + str(n), partial(hf.from_pretrained, path, tensor_parallel_size=n))
            for n in BAD
        ),
        (
            ValueError,
            "must divide the 4 heads of keys and values of LlamaForCausalLM, got 3",
            partial(split, model, tensor_parallel_size=3),
        ),
        (TypeError, "an integer, got 1.5", partial(split, model, tensor_parallel_size=1.5)),
        (TypeError, "must be a PreTrainedModel", partial(split, torch.nn.Linear(1, 1))),
        (ValueError, "parallelize: LlamaModel has no generate", partial(split, model.model)),
        (ValueError, "mesh: LlamaForCausalLM is not split", partial(hf.mesh, model)),
        (ValueError, "timeout must be above 0", partial(hf.from_pretrained, path, timeout=0)),
        (TypeError, "unexpected keyword argument 'spl", partial(hf.from_pretrained, path, split=1)),
        *(
            (ValueError, f"dtype must be .*, got {x!r}", partial(hf.from_pretrained, path, dtype=x))
            for x in ("bf16", torch.int8, torch.float8_e4m3fn)
        ),
        (
            ValueError,
            "enable: shares of weights are for from_pretrained and parallelize",
            partial(hf.enable, model, shares={"weights": [3, 2, 1]}),
        ),
    ]
    _check(refusals)
    calls = split, hf.from_pretrained, hf.enable
    refusals = [
        *(
            (error, f"^{call.__name__}: shares{says}", partial(call, first, shares=shares))
            for call, first in zip(calls, (model, path, model), strict=True)
            for error, says, shares in BAD_SHARES
        ),
        *(
            (
                ValueError,
                "shares and layout both say",
                partial(call, first, shares=shares, layout=BlockCyclic(3)),
            )
            for call, first in ((hf.from_pretrained, path), (hf.enable, model))
            for shares in ([3, 2, 1], "auto")
        ),
    ]
    with nothing_sent():
        _check(refusals)
    whole = model.state_dict()
    split(model)
    part = "each rank has only its part"
    refusals = [
        (ValueError, "is split already", partial(split, model)),
        (ValueError, "group must be None", partial(hf.enable, model, dist.group.WORLD)),
        (ValueError, "strategy must be", partial(hf.enable, model, strategy="butterfly")),
        (ValueError, "its weights are split", partial(hf.enable, model, prefill="split")),
        (NotImplementedError, f"save_pretrained: {part}", partial(model.save_pretrained, path)),
        (NotImplementedError, f"^state_dict: {part}", model.state_dict),
        (NotImplementedError, f"^state_dict: {part}", model.model.state_dict),
        (NotImplementedError, f"^state_dict: {part}", model.lm_head.state_dict),
        (NotImplementedError, f"^load_state_dict: {part}", partial(model.load_state_dict, whole)),
        (NotImplementedError, f"train: {part}", model.train),
        *(
            (NotImplementedError, "resize_token_embed", partial(x.resize_token_embeddings, 300))
            for x in (model, model.model)
        ),
        (NotImplementedError, "save_pretrained", partial(model.model.save_pretrained, path)),
    ]
    _check(refusals)
    model.eval()
    # Nothing above took the ranks apart.
    hf.enable(model)
    prompts = make_prompts()
    tokens = make_model("llama").generate(**prompts, **PROMPT)
    assert torch.equal(model.generate(**prompts, **PROMPT), tokens)
    ids = prompts["input_ids"].clone()
    ids[0, -1] = 199
    with pytest.raises((IndexError, RuntimeError), match="out of range"):
        model(ids, use_cache=False)
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="attention 'sdpa' does not merge the ranks' results"):
        model(ids, use_cache=False)
    model.set_attn_implementation("tree_attention")
    other = hf.TreeCache(model.config, dist.new_group([rank], use_local_synchronization=True))
    with pytest.raises(ValueError, match="make the cache with TreeCache"):
        model(ids[:, :9], **{CACHE_NAME: other})
    assert torch.equal(model.generate(**prompts, **PROMPT), tokens)


def _check(refusals: list[tuple[type[Exception], str, Callable[[], object]]]) -> None:
    for error, match, call in refusals:
        with pytest.raises(error, match=match):
            call()


def test_arguments(tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path)
    run_ranks(_arguments, 3, str(tmp_path))


@on_ranks(4)
def test_unequal_shares_in_a_tensor_group(rank: int, world_size: int) -> None:
    model, enabled = (
        make_model("llama"),
        hf.parallelize(make_model("llama"), tensor_parallel_size=2),
    )
    says = r" must be equal for the 2 consecutive ranks of each tensor group, got \[3, 1, 3, 1\]"
    given = {"shares": [3, 1, 3, 1]}
    with nothing_sent():
        _check(
            [
                (ValueError, f"^{call.__name__}: shares{says}", partial(call, first, **more))
                for call, first, more in (
                    (hf.parallelize, model, given | {"tensor_parallel_size": 2}),
                    (hf.from_pretrained, "nowhere", given | {"tensor_parallel_size": 2}),
                    (hf.enable, enabled, given),
                )
            ]
        )


class Linear(torch.nn.Module):
    """Named and made as the layers of peft are."""

    def __init__(self, base_layer: torch.nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer


@on_ranks(2)
def test_other_linear_layers_are_named(rank: int, world_size: int) -> None:
    model = make_model("llama")
    attention = model.model.layers[1].self_attn
    found = rf"1.self_attn.q_proj: it is no torch.nn.Linear, but {__name__}.Linear; "
    attention.q_proj = Linear(attention.q_proj)
    with pytest.raises(ValueError, match=found + "merge the adapter .*with merge_and_unload; use"):
        hf.parallelize(model)
    del attention.q_proj.base_layer
    with pytest.raises(ValueError, match=found + "use enable"):
        hf.parallelize(model)


@pytest.mark.deep
@on_ranks(4)
def test_a_cache_over_another_group_of_the_same_size(rank: int, world_size: int) -> None:
    model = hf.parallelize(make_model("llama"), tensor_parallel_size=2)
    cache = hf.TreeCache(model.config, hf.mesh(model).tensor_group)
    with pytest.raises(ValueError, match="make the cache with TreeCache"):
        model(make_prompts()["input_ids"], **{CACHE_NAME: cache})


# Two that the model has no place for, and those of older releases, which are left out.
EXTRA = (
    *("extra.weight", "extra.bias"),
    *("model.layers.0.self_attn.rotary_emb.inv_freq", "model.position_ids"),
)


def _damage(path: Path) -> dict[str, tuple[str, str]]:
    """Copies of the checkpoint in `path` that are each damaged in one way: the kind of error and a
    part of the sentence, by the name of the copy."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(path, path.with_name(name)))

    def change_weights(name: str, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
        file = copy(name) / "model.safetensors"
        weights = load_file(file)
        change(weights)
        save_file(weights, file)

    (copy("no weights") / "model.safetensors").unlink()
    file = copy("cut short") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    change_weights("a weight less", lambda w: w.pop("model.layers.1.mlp.up_proj.weight"))
    change_weights("two weights more", lambda w: w.update({x: torch.ones(2) for x in EXTRA}))
    change_weights("a shape", lambda w: w.update({"model.norm.weight": torch.ones(7)}))
    (copy("no config") / "config.json").unlink()
    index = copy("bad index") / "model.safetensors.index.json"
    index.write_text("{}")
    index = copy("deep index") / "model.safetensors.index.json"
    index.write_text("[" * 100_000)
    index = copy("other files") / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "../no weights/x"}}))
    index = copy("a file less") / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "model-2.safetensors"}}))
    (copy("bad defaults") / "generation_config.json").write_text('{"eos_token_id": ')
    for name, fields in (
        ("quantised", {"quantization_config": {"quant_method": "awq"}}),
        ("no object", {"quantization_config": "fp8"}),
        ("without blocks", {"quantization_config": {"quant_method": "fp8"}}),
        ("tied", {"tie_word_embeddings": True}),
        ("many layers", {"num_hidden_layers": 10**6}),
        ("no activation", {"hidden_act": "silu2"}),
        ("odd heads", {"num_attention_heads": 7}),
        ("no dtype", {"dtype": "float3"}),
    ):
        config = copy(name) / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | fields))
    return {
        "no weights": ("OSError", "has neither model.safetensors nor"),
        "cut short": ("ValueError", "model.safetensors is damaged"),
        "a weight less": ("ValueError", "lacks the weights model.layers.1.mlp.up_proj.weight"),
        "a shape": ("ValueError", r"model.norm.weight has the shape \[7\].*config.json \[48\]"),
        "no config": ("OSError", "config.json"),
        "two weights more": (
            "ValueError",
            "of its config.json lacks: extra.bias, extra.weight; co",
        ),
        "many layers": ("ValueError", "num_hidden_layers must be an integer of 1 to 1,000, got 10"),
        "no activation": ("ValueError", "no model of the config.json of .*: KeyError: 'silu2'"),
        "odd heads": ("ValueError", "no model of the config.json of .* not a multiple of the num"),
        "no dtype": ("ValueError", "no model of the config.json of .*has no attribute 'float3'"),
        "bad defaults": ("ValueError", "generation_config.json: it is no JSON: Expecting value"),
        "bad index": ("ValueError", "weight_map must name the file of each weight, .*, got None"),
        "deep index": ("ValueError", "from_pretrained: the index .*json: it is nested too deeply"),
        "other files": ("ValueError", "weight_map must name the file of each weight, in this dir"),
        "a file less": ("OSError", "lacks the file model-2.safetensors, which its index names"),
        "tied": ("ValueError", "embed_tokens.weight and lm_head.weight differ"),
        "quantised": ("ValueError", "quantised by 'awq', and those can be read .* of fp8, mxfp4"),
        "no object": ("ValueError", "json: quantization_config must be an object, got 'fp8'"),
        "without blocks": ("ValueError", "quantised by 'fp8', .* fp8 in blocks; take a checkpoint"),
    }


def _damaged(rank: int, world_size: int, path: Path, damages: dict[str, tuple[str, str]]) -> None:
    for name, (kind, match) in damages.items():
        # All ranks read the damaged one, and then one of them does.
        with pytest.raises((OSError, ValueError), match=match) as raised:
            hf.from_pretrained(path.with_name(name))
        assert isinstance(raised.value, OSError if kind == "OSError" else ValueError), name
        if rank == 1:
            with pytest.raises((OSError, ValueError), match=match):
                hf.from_pretrained(path.with_name(name))
        else:
            with pytest.raises(ExchangeError, match="on rank 1") as raised:
                hf.from_pretrained(path)
            assert re.search(match, str(raised.value)), raised.value
    model = hf.from_pretrained(path)
    tokens = make_model("llama").generate(**make_prompts(), **PROMPT)
    assert torch.equal(model.generate(**make_prompts(), **PROMPT), tokens)


@pytest.mark.deep
def test_damaged_checkpoints(tmp_path: Path) -> None:
    """On all ranks and on one of them: the others say what it said."""
    path = tmp_path / "whole"
    make_model("llama").save_pretrained(path)
    run_ranks(_damaged, 2, path, _damage(path))


def test_a_hub_that_is_not_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_reached(*args: object, **options: object) -> None:
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.setattr("transformers.utils.hub.hf_hub_download", not_reached)
    says = "nobody/none is no directory, .* Hub that can be read: We couldn't connect to 'https://"
    with pytest.raises(OSError, match=says) as raised:
        hf.from_pretrained("nobody/none")
    assert raised.value.__suppress_context__


def _different(rank: int, world_size: int, paths: list[Path]) -> None:
    with pytest.raises(ExchangeError, match="digest of all weights"):
        hf.from_pretrained(paths[rank])
    weights, dtype = ("int8", "int4")[rank], (torch.bfloat16, None)[rank]
    with pytest.raises(ExchangeError, match="weights is int4 on rank 1, int8 on rank 0"):
        hf.from_pretrained(paths[0], weights=weights)
    with pytest.raises(ExchangeError, match=r"dtype is torch.float32 on rank 1, torch.bfloat16 on"):
        hf.from_pretrained(paths[0], dtype=dtype)
    # The one says what is wrong with its arguments, and the other what the first one said.
    for name, value, says in (
        ("weights", "int2", "weights must be one of int8, int4 or None, got 'int2'"),
        ("dtype", torch.int8, "dtype must be one of auto, float32, .*, got torch.int8"),
    ):
        kind = ValueError if rank == 1 else ExchangeError
        with pytest.raises(kind, match=says):
            hf.from_pretrained(paths[0], **({name: value} if rank == 1 else {}))
    model = make_model("llama")
    if rank == 1:
        model.get_parameter("model.layers.0.mlp.up_proj.weight").data[0, 0] += 1
    with pytest.raises(ExchangeError, match="digest of all weights"):
        hf.parallelize(model)
    with pytest.raises(ExchangeError, match="tensor_parallel_size is 2 on rank 1"):
        hf.parallelize(model, tensor_parallel_size=rank + 1)
    # The refused model is whole.
    assert torch.isfinite(model(**make_prompts()).logits).all()
    assert model.state_dict()


def test_ranks_with_different_checkpoints(tmp_path: Path) -> None:
    paths = [tmp_path / str(rank) for rank in range(2)]
    for path, name in zip(paths, ("llama", "llama_tied"), strict=True):
        make_model(name).save_pretrained(path)
    run_ranks(_different, 2, paths)


# What a directory has in place of model.safetensors, and a part of the sentence.
OTHER_FILES: dict[str, tuple[list[str], str]] = {
    "pickles": (["config.json", "pytorch_model.bin"], "pytorch_model.bin is pickles of torch"),
    "parts of pickles": (
        ["config.json", "pytorch_model.bin.index.json", "pytorch_model-00001-of-00002.bin"],
        r"pytorch_model-00001-of-00002.bin is .*, and then call save_pretrained\(directory\) once",
    ),
    "a variant": (["config.json", "model.fp16.safetensors"], "16.safetensors is a variant: load"),
    "parts without an index": (
        ["config.json", "model-00001-of-00002.safetensors"],
        "is parts of a checkpoint without model.safetensors.index.json, which names them",
    ),
    "Mistral's": (["params.json", "consolidated.safetensors"], "in their maker's own format"),
    "GGUF": (["llama-Q4_K_M.gguf"], r"llama-Q4_K_M.gguf is GGUF: .*\(path, gguf_file=...\)"),
    "an adapter": (["adapter_config.json", "adapter_model.safetensors"], "is an adapter of peft: "),
    "TensorFlow": (["config.json", "tf_model.h5"], "tf_model.h5 is weights of TensorFlow"),
    "Flax": (["config.json", "flax_model.msgpack"], "flax_model.msgpack is weights of Flax"),
    "nothing": ([], "has no config.json; the directory is empty"),
    "weights": (["model.safetensors"], "has no config.json; copy or download that as well"),
    "parts of weights": (
        ["model.safetensors.index.json", "model-00001-of-00002.safetensors"],
        "has no config.json; copy or download that as well",
    ),
    "a configuration": (["config.json"], "index.json; copy or download the checkpoint again"),
}


@pytest.mark.parametrize("name", OTHER_FILES)
def test_directories_of_other_files(name: str, tmp_path: Path) -> None:
    files, match = OTHER_FILES[name]
    for file in files:
        (tmp_path / file).write_bytes(b"{}")
    if "config.json" in files:
        make_model("llama").config.save_pretrained(tmp_path)
    with pytest.raises(OSError, match=match):
        hf.from_pretrained(tmp_path)


def test_paths_of_files(tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    with pytest.raises(OSError, match=r"model\.safetensors is a file; give the directory that has"):
        hf.from_pretrained(file)
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 123\n")
    with pytest.raises(ValueError, match=r"is a pointer of Git LFS, not the file .* git lfs pull"):
        hf.from_pretrained(tmp_path)
    shutil.copy(file, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text(file.read_text())
    with pytest.raises(ValueError, match=r"config\.json: it is no JSON"):
        hf.from_pretrained(tmp_path)


def test_safetensors_beside_other_files(tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path)
    for file in ("pytorch_model.bin", "model.fp16.safetensors", "consolidated.safetensors"):
        (tmp_path / file).write_bytes(b"")
    found = hf.from_pretrained(tmp_path).generate(**make_prompts(), **PROMPT)
    assert torch.equal(found, make_model("llama").generate(**make_prompts(), **PROMPT))


@on_ranks(2)
def test_shares_that_differ_are_found(rank: int, world_size: int) -> None:
    with pytest.raises(
        ExchangeError, match=r"shares is \(\(1, 2\), .* on rank 1, \(None, None, No"
    ):
        hf.parallelize(make_model("llama"), shares=[1, 1 + rank])
    model = hf.enable(make_model("llama"), shares=[2, 1 + rank], timeout=10)
    with pytest.raises(ExchangeError, match=r"layout is BlockCyclic.* on rank "):
        model.generate(**make_prompts(), **PROMPT)


@on_ranks(2)
def test_shares_of_prompts_that_differ_are_found(rank: int, world_size: int) -> None:
    shares = {"prompt": [3, 1 + rank]}
    model = hf.enable(make_model("llama"), shares=shares, prefill="split", timeout=10)
    with pytest.raises(
        ExchangeError, match=r"shares of a prompt is \(3, 2\) on rank 1, \(3, 1\) on"
    ):
        model.generate(**make_prompts(), **PROMPT)


@on_ranks(2)
def test_measured_shares_and_given_ones(rank: int, world_size: int) -> None:
    """Only the rank that measures asks the others."""
    with pytest.raises(ExchangeError, match="call is generate on rank 1, enable on rank 0"):
        model = hf.enable(make_model("llama"), shares=("auto", [3, 1])[rank], timeout=10)
        model.generate(**make_prompts(), **PROMPT)
