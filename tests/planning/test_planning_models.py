# SPDX-License-Identifier: BSD-3-Clause
"""planning.models: shapes that count the weights that models have, and what is refused."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tree_attention.hf.kv_dtypes import KV_DTYPES as OF_8_BITS
from tree_attention.planning.models import FAMILIES, KV_DTYPES, NAMED, find_model, from_config
from tree_attention.reference import quantise

TINY = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_those_of_transformers(family: str, tied: bool) -> None:
    config = AutoConfig.for_model(family, **TINY, tie_word_embeddings=tied, sliding_window=None)
    config.layer_types = ["full_attention"] * 3
    with torch.device("meta"):
        parameters = AutoModelForCausalLM.from_config(config).parameters()
    matrices = sum(parameter.numel() for parameter in parameters if parameter.dim() == 2)
    model = from_config("tiny", config)
    ends = model.end_weights * (1 if tied else 2)
    assert model.layers * model.layer_weights + ends == matrices > 0


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        *(("llama-3.2-1b", 1.23), ("llama-3.2-3b", 3.21), ("llama-3.1-8b", 8.03)),
        *(("llama-3.1-70b", 70.6), ("llama-3.1-405b", 405)),
    ],
)
def test_named_shapes_have_as_many_weights_as_their_model_cards_say(
    name: str, billions: float
) -> None:
    model = NAMED[name]
    weights = model.layers * model.layer_weights + model.end_weights * (1 if model.tied else 2)
    assert weights / 1e9 == pytest.approx(billions, rel=5e-3)


def test_directory_with_config(tmp_path: Path) -> None:
    AutoConfig.for_model("llama", **TINY).save_pretrained(tmp_path)
    model = find_model(str(tmp_path))
    assert (model.layers, model.heads, model.kv_heads, model.head_dim) == (3, 4, 2, 16)
    assert model.name == tmp_path.name


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_keys_and_values_are_as_large_as_they_are_cached(kv_dtype: str) -> None:
    model = replace(NAMED["llama-3.2-1b"], kv_dtype=kv_dtype)
    x = torch.randn(1, model.kv_heads, 1, model.head_dim, dtype=torch.bfloat16)
    cached = [x] if kv_dtype == "bf16" else quantise(x, OF_8_BITS[kv_dtype])
    assert model.kv_bytes == 2 * sum(tensor.nbytes for tensor in cached)


@pytest.mark.parametrize(
    ("family", "options", "sentence"),
    [
        ("mixtral", {}, "tiny is of type 'mixtral'; known are dense models"),
        ("deepseek_v3", {}, "tiny is of type 'deepseek_v3'"),
        ("mistral", {"sliding_window": 128}, "tiny has layers that see a window"),
        (
            "qwen3",
            {"layer_types": ["sliding_attention", "full_attention", "full_attention"]},
            "tiny has layers that see a window",
        ),
    ],
)
def test_other_models_are_refused(family: str, options: dict[str, object], sentence: str) -> None:
    sizes = {} if family == "deepseek_v3" else TINY
    with pytest.raises(ValueError, match=sentence):
        from_config("tiny", AutoConfig.for_model(family, **sizes, **options))


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"model_type": "nothing"}',
        '{"model_type": "nothing", "auto_map": {"AutoConfig": "code.Config"}}',  # runs no code
        '{"model_type": "llama", "hidden_size": "64"}',
        '{"model_type": "llama", "num_attention_heads": 0}',
    ],
)
def test_damaged_configurations_are_refused_in_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"config\.json cannot be read: .+\Z"):
        find_model(str(tmp_path))


def test_sizes_are_positive() -> None:
    config = AutoConfig.for_model("llama", **(TINY | {"num_hidden_layers": 0}))
    with pytest.raises(ValueError, match="tiny: num_hidden_layers must be at least 1, got 0"):
        from_config("tiny", config)


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"llama-9 is no directory .* llama-3\.2-1b, llama"):
        find_model("llama-9")


def test_directories_need_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match=r"needs transformers: pip install 'tree-attention\[hf\]'"):
        find_model(str(tmp_path))
