# SPDX-License-Identifier: BSD-3-Clause
"""Checkpoints of text and images, of which the text is taken: the tokens of the whole model's text.

The mistakes these tests are for: a head that is tied and has numbers of its own, or is not, and
weights of the text left out with the towers.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from distributed import run_ranks

pytest.importorskip("transformers")

from generations import stable_choices
from tree_attention import hf

_TEXT = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
_IMAGES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_QWEN_IMAGES = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
}
_QWEN_TOKENS = {
    "image_token_id": 190,
    "video_token_id": 191,
    "vision_start_token_id": 192,
    "vision_end_token_id": 193,
}
_PIXTRAL = {**_IMAGES, "model_type": "pixtral", "head_dim": 16}
# The class of the whole model without its ending, and its configuration.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Gemma 3": (
        "Gemma3",
        {
            "text_config": {
                **_TEXT,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            "vision_config": _IMAGES,
            "mm_tokens_per_image": 4,
            "image_token_index": 190,
        },
    ),
    "Mistral 3, tied": (
        "Mistral3",
        {"text_config": {**_TEXT, "model_type": "mistral"}, "vision_config": _PIXTRAL},
    ),
    "Mistral 3": (
        "Mistral3",
        {
            "text_config": {**_TEXT, "model_type": "mistral"},
            "vision_config": _PIXTRAL,
            "tie_word_embeddings": False,
        },
    ),
    "Llama 4": (
        "Llama4",
        {
            "text_config": {
                **_TEXT,
                "intermediate_size_mlp": 96,
                "num_local_experts": 2,
                "attention_chunk_size": 64,
            },
            "vision_config": {
                **_IMAGES,
                "vision_output_dim": 64,
                "projector_input_dim": 64,
                "projector_output_dim": 64,
            },
        },
    ),
    "MiniMax-M3": (
        "MiniMaxM3VL",
        {
            "text_config": {
                **_TEXT,
                **{"num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 4},
                **{"dense_intermediate_size": 96, "shared_intermediate_size": 48},
                **{"index_n_heads": 2, "index_head_dim": 16},
                **{"index_block_size": 4, "index_topk_blocks": 2},
                "layer_types": ["full_attention", "minimax_m3_sparse"],
                "mlp_layer_types": ["dense", "sparse"],
            },
            "vision_config": _IMAGES,
            "projector_hidden_size": 64,
        },
    ),
    "Qwen 3.5": (
        "Qwen3_5",
        {
            "text_config": {
                **_TEXT,
                "layer_types": ["linear_attention", "full_attention"],
                "linear_num_value_heads": 4,
                "linear_num_key_heads": 2,
                "linear_key_head_dim": 8,
                "linear_value_head_dim": 8,
            },
            "vision_config": _QWEN_IMAGES,
            **_QWEN_TOKENS,
        },
    ),
    "Qwen3-VL": (
        "Qwen3VL",
        {
            "text_config": _TEXT,
            "vision_config": {**_QWEN_IMAGES, "deepstack_visual_indexes": [0]},
            **_QWEN_TOKENS,
        },
    ),
}
# Where the class has another name than the configuration.
CLASSES = {"MiniMaxM3VL": "MiniMaxM3Sparse"}
NAMES = [name for name, (kind, _) in MODELS.items() if hasattr(transformers, f"{kind}Config")]
IDS = torch.randint(3, 180, (2, 20), generator=torch.Generator().manual_seed(1))
GREEDY = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}


def _whole(name: str) -> Any:
    kind, options = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**options)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        kind = CLASSES.get(kind, kind)
        return getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()


@torch.no_grad()
def _read(rank: int, world_size: int, path: Path, expected: Tensor, logits: Tensor) -> None:
    for size in {1, min(2, world_size)}:
        model = hf.from_pretrained(path, tensor_parallel_size=size)
        assert type(model).__name__.endswith("ForCausalLM")
        assert torch.equal(model.generate(IDS, **GREEDY), expected)
        kept = {hf.CACHE_NAME: hf.TreeCache(model.config, hf.mesh(model).context_group)}
        torch.testing.assert_close(model(IDS, **kept).logits, logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "Qwen3-VL"])
def test_tokens_are_those_of_the_whole_model(name: str, tmp_path: Path) -> None:
    model = _whole(name)
    model.save_pretrained(tmp_path)
    # Of Llama 4 the whole class cannot generate in transformers 5.24.
    text = model.language_model if name == "Llama 4" else model
    with torch.no_grad(), stable_choices():
        expected = text.generate(IDS, **GREEDY)
        logits = text(IDS).logits
    for world_size in (1, 2):
        run_ranks(_read, world_size, tmp_path, expected, logits)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    lost = next(
        x
        for x in weights
        if x.endswith("layers.1.mlp.up_proj.weight") or re.search("1.(feed_forw|block_spar)", x)
    )
    save_file({key: x for key, x in weights.items() if key != lost}, file)
    with pytest.raises(ValueError, match=r"lacks the weights model\.layers\.1\."):
        hf.from_pretrained(tmp_path)


def test_a_head_of_its_own_is_taken_where_the_configuration_says_nothing(tmp_path: Path) -> None:
    """As the files of Mistral Small 3.1, whose configuration has no tie_word_embeddings."""
    model = _whole("Mistral 3")
    model.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    del config["tie_word_embeddings"], config["text_config"]["tie_word_embeddings"]
    file.write_text(json.dumps(config))
    found = hf.from_pretrained(tmp_path).generate(IDS, **GREEDY)
    assert torch.equal(found, model.generate(IDS, **GREEDY))


def test_models_without_a_class_of_text_are_refused(tmp_path: Path) -> None:
    if "Qwen3-VL" in NAMES:
        _whole("Qwen3-VL").save_pretrained(tmp_path)
        with pytest.raises(ValueError, match="model_type 'qwen3_vl_text', for which transformers"):
            hf.from_pretrained(tmp_path)
    reasons = {
        "T5Config": "'t5', an encoder with a decoder; only decoders of text alone are supported",
        "CLIPConfig": "no model of text with a language head",
    }
    for name, reason in reasons.items():
        getattr(transformers, name)().save_pretrained(tmp_path)
        with pytest.raises(ValueError, match=reason):
            hf.from_pretrained(tmp_path)


def test_a_whole_model_that_is_enabled_names_its_text() -> None:
    with pytest.raises(
        ValueError,
        match=r"got 'gemma3'; its text is a Gemma3ForCausalLM, which hf.from_pretrained\(path\) re",
    ):
        hf.enable(_whole("Gemma 3"))
