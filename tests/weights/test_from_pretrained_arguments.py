# SPDX-License-Identifier: BSD-3-Clause
"""What users of transformers give to `from_pretrained`: taken, or answered with the word for it.

The mistakes these tests are for: a directory that is misspelt and looked for on the Hub for half a
minute, a token that does not reach each file, an encoder that is refused after its weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from transformers import AutoModelForCausalLM

from split_models import make_model, make_prompts
from tree_attention import hf
from tree_attention.weights.checkpoint import files

PROMPT = {"max_new_tokens": 3, "do_sample": False}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "models" / "tiny-llama"
    make_model("llama").save_pretrained(path)
    return path


@pytest.mark.parametrize(
    "dtype, expected",
    [("bfloat16", torch.bfloat16), ("float16", torch.float16), ("auto", torch.float32)],
)
def test_dtypes_by_name(dtype: Any, expected: torch.dtype, checkpoint: Path) -> None:
    model = hf.from_pretrained(checkpoint, dtype=dtype, attn_implementation="tree_attention")
    assert model.dtype == expected


@pytest.mark.parametrize(
    "name, says",
    [
        ("torch_dtype", "; dtype has its meaning"),
        ("device_map", "; device has its meaning"),
        ("load_in_8bit", '; weights="int8" has its meaning'),
        ("load_in_4bit", '; weights="int4" has its meaning'),
        ("quantization_config", '; weights="int8" or "int4" quantises'),
        ("trust_remote_code", "; leave it out: models of transformers alone"),
        ("low_cpu_mem_usage", "; leave it out: each rank reads its parts"),
        ("cache_dir", "; set HF_HUB_CACHE in the environment"),
        ("force_download", "; give the directory that huggingface_hub.snapshot_download"),
        ("gguf_file", "; transformers has it: load the model with that"),
        ("kv_cache_dtype", "; kv_dtype has its meaning"),
        ("context_parallel_size", "; leave it out: the cache is split over the ranks of group"),
        ("output_attentions", "; transformers has it: load the model with that"),
        ("wieghts", r"; did you mean weights\?"),
        ("nothing_of_the_kind", "$"),
    ],
)
def test_arguments_of_transformers(name: str, says: str) -> None:
    match = rf"from_pretrained\(\) got an unexpected keyword argument '{name}'{says}"
    with pytest.raises(TypeError, match=match):
        hf.from_pretrained("nobody/none", **{name: True})


@pytest.mark.parametrize(
    "name, says",
    [
        ("cp_size", "; leave it out: the cache is split over the ranks of group"),
        ("tensor_parallel_size", "; from_pretrained and parallelize have it"),
    ],
)
def test_arguments_of_parallelism_in_enable(name: str, says: str) -> None:
    match = rf"enable\(\) got an unexpected keyword argument '{name}'{says}"
    with pytest.raises(TypeError, match=match):
        hf.enable(make_model("llama"), **{name: 2})


@pytest.mark.parametrize(
    "kind, says, options",
    [
        (ValueError, "attn_implementation must be .*, got 'sdpa'", {"attn_implementation": "sdpa"}),
        (ValueError, "device must be a CPU or CUDA .*, got 'auto'", {"device": "auto"}),
        (ValueError, "device must be a CPU or CUDA .*, got 'mps'", {"device": "mps"}),
        (TypeError, "token must be a string, True or None, got int$", {"token": 17}),
        (TypeError, "revision must be the name of a branch.*, got 3", {"revision": 3}),
        # Before weights are read, as `enable` says it.
        (ValueError, "kv_dtype must be None or one of .*, got 'int5'", {"kv_dtype": "int5"}),
    ],
)
def test_wrong_values(kind: Any, says: str, options: Any, checkpoint: Path) -> None:
    with pytest.raises(kind, match=says):
        hf.from_pretrained(checkpoint, **options)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is asked of the Hub."""
    asked: list[Any] = []
    original = transformers.utils.hub.hf_hub_download

    def ask(*args: Any, local_files_only: bool, **options: Any) -> Any:
        if local_files_only:
            return original(*args, local_files_only=True, **options)
        asked.append(args)
        raise OSError("not reached")

    monkeypatch.setattr("transformers.utils.hub.hf_hub_download", ask)
    return asked


@pytest.mark.parametrize(
    "path, says",
    [
        ("models/tiny-lama", "there is no directory models/tiny-lama; did you mean models/tiny-l"),
        ("models/tiny-lama", "As models is a directory here.* call `hf download models/tiny-lama`"),
        ("./model/tiny-llama", r"there is no directory .*; did you mean models/tiny-llama\?$"),
        ("a/b/c", "there is no directory a/b/c; give the directory of a checkpoint"),
        ("/nowhere", "there is no directory /nowhere; give the directory of a checkpoint"),
        ("~/nowhere", "there is no directory /.*/nowhere; give"),
        ("https://hub.example/a/b", "https://hub.example/a/b is an address; give the name alone"),
        (Path("nowhere"), "there is no directory nowhere; .* or, as a string, a name on the Hub"),
    ],
)
def test_paths_are_not_asked_of_the_hub(
    path: Any, says: str, hub: list[Any], checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(checkpoint.parent.parent)
    with pytest.raises(OSError, match=says):
        hf.from_pretrained(path)
    assert not hub
    with pytest.raises(OSError, match=r"is no directory, and no name on .*mean models/tiny-llama"):
        hf.from_pretrained("model/tiny-llama")  # which may be on the Hub
    assert hub


@pytest.mark.parametrize(
    "path, kind", [(None, TypeError), (3, TypeError), (b"x", TypeError), ("", ValueError)]
)
def test_what_is_no_path(path: Any, kind: type[Exception], hub: list[Any]) -> None:
    with pytest.raises(kind, match="path must be a directory, or a name on the Hugging Face Hub"):
        hf.from_pretrained(path)
    assert not hub


def test_token_and_revision_reach_the_hub(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []

    def serve(name: str, file: str, *_: Any, **options: Any) -> str | None:
        asked.append((name, file, options["token"], options["revision"]))
        return str(checkpoint / file) if (checkpoint / file).exists() else None

    for module in (
        files,
        transformers.configuration_utils,
        transformers.generation.configuration_utils,
    ):
        monkeypatch.setattr(module, "cached_file", serve)
    model = hf.from_pretrained("nobody/llama", token="secret", revision="v2")
    assert torch.equal(
        model.generate(**make_prompts(), **PROMPT),
        make_model("llama").generate(**make_prompts(), **PROMPT),
    )
    names = {"config.json", "model.safetensors", "generation_config.json"}
    assert {file for _, file, *_ in asked} >= names
    assert {(name, *rest) for name, _, *rest in asked} == {("nobody/llama", "secret", "v2")}
    assert [file for _, file, *_ in asked].count("config.json") == 2  # ours, and transformers'
    assert "secret" not in repr(files.Source.of("nobody/llama", "secret"))


ENCODERS = {
    "bert": ("BertConfig", "enable: BertLMHeadModel is an encoder: in its BertSelfAttention"),
    "vit": ("ViTConfig", "has the model_type 'vit', for which .* no model of text"),
    "bart": ("BartConfig", "has the model_type 'bart', an encoder with a decoder"),
}


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_are_refused_before_weights_are_read(name: str, tmp_path: Path) -> None:
    kind, says = ENCODERS[name]
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    config = getattr(transformers, kind)(num_hidden_layers=2, **sizes)
    config.save_pretrained(tmp_path)
    make_model("llama").save_pretrained(tmp_path / "llama")  # other weights: they are not read
    (tmp_path / "llama" / "model.safetensors").rename(tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=says):
        hf.from_pretrained(tmp_path)


def test_attention_of_transformers_loading(checkpoint: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(
        checkpoint, attn_implementation="tree_attention"
    )
    expected = make_model("llama").generate(**make_prompts(), **PROMPT)
    assert torch.equal(model.generate(**make_prompts(), **PROMPT), expected)
    assert torch.equal(hf.enable(model).generate(**make_prompts(), **PROMPT), expected)
