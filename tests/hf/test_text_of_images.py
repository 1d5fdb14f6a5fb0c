# SPDX-License-Identifier: BSD-3-Clause
"""Models of text and images, of which the text is spread over ranks: the whole model's tokens.

The mistakes these tests are for: a head that is tied and has numbers of its own, or is not; weights
of the text left out with the towers; an encoder of images that is taken for a part of the text; and
images that are read by some ranks, or not at all, without a word.
"""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from distributed import on_ranks, run_ranks

pytest.importorskip("transformers")

from generations import stable_choices
from tiers import tiers, tiers_of
from tree_attention import BlockCyclic, ExchangeError, hf
from tree_attention.__main__ import main
from tree_attention.cli.models import find_model
from tree_attention.hf.prompts.forward import may_be_chunked, rope_of_all_positions

ROOT = Path(__file__).parents[2]
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
_LATENTS = {
    **{"num_key_value_heads": 8, "kv_lora_rank": 32, "v_head_dim": 16},
    **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 16},
    **{"index_topk": 6, "index_n_heads": 4, "index_head_dim": 16},
}
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
    "DeepSeek-OCR 2": (
        "DeepseekOcr2",
        {
            "text_config": {
                **_TEXT,
                **{"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
                **{"moe_intermediate_size": 48, "mlp_layer_types": ["dense", "sparse"]},
            },
            "vision_config": {
                "sam_config": {
                    **{**_IMAGES, "image_size": 56, "output_channels": 8, "window_size": 2},
                    **{"global_attn_indexes": [0], "mlp_dim": 48, "downsample_channels": [8, 32]},
                },
                "encoder_config": {
                    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1},
                    **{"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 9},
                },
            },
            "image_token_id": 190,
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
    "Mistral Large 4": (
        "MistralLarge4",
        {
            "text_config": {
                **_TEXT,
                **_LATENTS,
                **{"num_hidden_layers": 3, "no_rope_layers": [1, 0, 1], "n_routed_experts": 4},
                **{"num_experts_per_tok": 2, "moe_intermediate_size": 48},
            },
            "vision_config": _PIXTRAL,
        },
    ),
    "HunYuan 4": (
        "HYV4VL",
        {
            "text_config": {
                **_TEXT,
                **_LATENTS,
                **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
                **{"q_lora_rank": 48, "indexer_types": ["full", "shared"]},
                "rope_parameters": {
                    **{"rope_type": "default", "rope_theta": 10000.0},
                    "mrope_section": [2, 1, 1],
                },
            },
            "vision_config": {**_IMAGES, "out_hidden_size": 64},
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


def _whole(name: str, **of_text: Any) -> Any:
    kind, options = MODELS[name]
    options = {**options, "text_config": {**options["text_config"], **of_text}}
    config = getattr(transformers, f"{kind}Config")(**copy.deepcopy(options))
    with torch.random.fork_rng():
        torch.manual_seed(3)
        kind = CLASSES.get(kind, kind)
        model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
        for x in model.parameters():  # as ones and zeros of norms and scales
            if x.min() == x.max():
                x.data += 0.1 * torch.randn_like(x)
    return model


@torch.no_grad()
def _read(rank: int, world_size: int, path: Path, expected: Tensor, logits: Tensor) -> None:
    for size in {1, 2 if world_size % 2 == 0 else 1}:
        model = hf.from_pretrained(path, tensor_parallel_size=size)
        is_alone = type(model).__name__.endswith("ForCausalLM")
        assert is_alone or model.model.get_encoder("image") in (None, model.model)
        assert torch.equal(model.generate(IDS, **GREEDY), expected)
        kept = {hf.CACHE_NAME: hf.TreeCache(model.config, hf.mesh(model).context_group)}
        torch.testing.assert_close(model(IDS, **kept).logits, logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "name",
    tiers_of(NAMES, quick=("Gemma 3", "MiniMax-M3")),
)
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
    lost = next(x for x in weights if re.search(r"layers\.1\..*(o_proj|\.wo)\.weight", x))
    save_file({key: x for key, x in weights.items() if key != lost}, file)
    with pytest.raises(
        ValueError, match=r"lacks the weights model\.(language_model\.)?layers\.1\."
    ):
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
    reasons = {
        "T5Config": "'t5', an encoder with a decoder; only decoders are supported",
        "CLIPConfig": "no model of text with a language head",
    }
    for name, reason in reasons.items():
        getattr(transformers, name)().save_pretrained(tmp_path)
        with pytest.raises(ValueError, match=reason):
            hf.from_pretrained(tmp_path)


def _enable(rank: int, world_size: int, name: str, expected: Tensor, logits: Tensor) -> None:
    layout = BlockCyclic(world_size, 4)
    model = hf.enable(_whole(name), layout=layout)
    assert torch.equal(model.generate(IDS, **GREEDY), expected)
    with torch.no_grad():
        kept = {hf.CACHE_NAME: hf.TreeCache(model.config, layout=layout)}
        torch.testing.assert_close(model(IDS, **kept).logits, logits, rtol=1e-3, atol=1e-3)
    for size in {1, 2 if world_size % 2 == 0 else 1}:
        split = hf.enable(hf.parallelize(_whole(name), tensor_parallel_size=size))
        assert torch.equal(split.generate(IDS, **GREEDY), expected)


# Of Llama 4 the whole class can neither generate nor give logits in transformers 5.24.
ENABLED = [name for name in NAMES if name not in ("Llama 4", "Mistral 3, tied")]


@pytest.mark.parametrize(
    "name, world_size",
    tiers_of(
        ((name, world_size) for name in ENABLED for world_size in (1, 2, 3)),
        [("Gemma 3", 2)],
    ),
)
def test_whole_models_that_are_enabled(name: str, world_size: int) -> None:
    model = _whole(name)
    with torch.no_grad(), stable_choices():
        expected, logits = model.generate(IDS, **GREEDY), model(IDS).logits
    run_ranks(_enable, world_size, name, expected, logits)


@pytest.mark.parametrize("name", tiers(["Qwen3-VL"], ["Qwen 3.5"]))
def test_positions_of_an_earlier_call_are_forgotten(name: str) -> None:
    """Offsets after images, and of as many sequences as the call before had."""
    model, asked = _whole(name), IDS[:1]
    said = [model.generate(asked, **GREEDY)]
    said.append(model.generate(torch.cat([said[0], asked], 1), **GREEDY))
    hf.enable(model).base_model.rope_deltas = torch.full((1, 1), -5)
    cache = hf.TreeCache(model.config)
    assert torch.equal(model.generate(asked, **{hf.CACHE_NAME: cache}, **GREEDY), said[0])
    ids = torch.cat([said[0], asked], 1)
    assert torch.equal(model.generate(ids, **{hf.CACHE_NAME: cache}, **GREEDY), said[1])
    document = hf.TreeCache(model.config)
    with torch.no_grad():
        model(said[0][:, :-1], **{hf.CACHE_NAME: document})
    for rows in (3, 2, 1):
        shared = {hf.CACHE_NAME: document.share(rows)}
        assert torch.equal(model.generate(ids.repeat(rows, 1), **shared, **GREEDY)[-1:], said[1])


def test_beams_of_a_rope_that_all_positions_change() -> None:
    """Which the configuration of the text alone has: the prompt is read whole."""
    text = _whole("Mistral 3").config.text_config
    text.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    whole = transformers.Mistral3Config(text_config=text)
    assert rope_of_all_positions(whole) == rope_of_all_positions(text) == "dynamic"
    assert not may_be_chunked(whole)


def test_what_enable_changes_is_undone() -> None:
    model = _whole("Gemma 3")
    pixels = {"pixel_values": torch.randn(1, 3, 28, 28)}
    ids = torch.tensor([[5, *[190] * 4, 7]])  # 190: of an image
    with torch.no_grad():
        before = model(ids, **pixels).logits
        kinds = [x._attn_implementation for x in (model.config, model.config.vision_config)]
        hf.enable(model)
        assert [x._attn_implementation for x in (model.config, model.config.vision_config)] == kinds
        with pytest.raises(NotImplementedError, match="pixel_values is not supported"):
            model(ids, **pixels)
        assert torch.equal(hf.disable(model)(ids, **pixels).logits, before)


GEMMA_PIXELS = torch.zeros(1, 3, 28, 28)
QWEN_PIXELS = {"pixel_values": torch.zeros(4, 24), "image_grid_thw": torch.tensor([[1, 2, 2]])}
OTHERS: dict[str, tuple[str, dict[str, Any], str]] = {
    "pixels": ("Gemma 3", {"pixel_values": GEMMA_PIXELS}, "pixel_values is not supported"),
    "videos": ("Qwen3-VL", {"pixel_values_videos": GEMMA_PIXELS}, "pixel_values_videos is not"),
    "encoded": ("Qwen3-VL", {"mm_encoder_outputs": {"image": GEMMA_PIXELS}}, "mm_encoder_outputs"),
    "places": (
        "Gemma 3",
        {"token_type_ids": torch.ones_like(IDS)},
        "token_type_ids names tokens of images or sound: give a prompt without",
    ),
}


@pytest.mark.parametrize("case", OTHERS)
@on_ranks(2)
def test_anything_but_text_is_refused(rank: int, world_size: int, case: str) -> None:
    name, given, says = OTHERS[case]
    model = hf.enable(_whole(name))
    with pytest.raises(NotImplementedError, match=f"generate: only text is spread .*; {says}"):
        model.generate(IDS, **given, **GREEDY)
    cache = hf.TreeCache(model.config)
    with (
        torch.no_grad(),
        pytest.raises(NotImplementedError, match=f"tree_attention: only text is spread.*; {says}"),
    ):
        model(IDS, **given, **{hf.CACHE_NAME: cache})
    # On one rank alone.
    with pytest.raises((NotImplementedError, ExchangeError), match="only text is spread over rank"):
        model.generate(IDS, **(given if rank == 1 else {}), **GREEDY)


def test_pixels_of_a_model_that_was_read_without_its_encoder(tmp_path: Path) -> None:
    _whole("Qwen3-VL").save_pretrained(tmp_path)
    model = hf.from_pretrained(tmp_path)
    with pytest.raises(NotImplementedError, match=r"only text .*; pixel_values is not supported"):
        model.generate(IDS, **QWEN_PIXELS, **GREEDY)


@pytest.mark.parametrize("name, kinds", [("Gemma 3", "token_type_ids"), ("Qwen3-VL", "mm_token_t")])
def test_zeros_that_processors_give_for_text(name: str, kinds: str) -> None:
    model = _whole(name)
    expected = model.generate(IDS, **GREEDY)
    kinds = "mm_token_type_ids" if kinds.startswith("mm") else kinds
    found = hf.enable(model).generate(IDS, **{kinds: torch.zeros_like(IDS)}, **GREEDY)
    assert torch.equal(found, expected)


def test_a_cache_of_the_whole_goes_on_in_the_text(tmp_path: Path) -> None:
    """Both name the model of the text: what one saved the other loads."""
    whole, checkpoint = _whole("Mistral 3"), tmp_path / "model"
    whole.save_pretrained(checkpoint)
    hf.enable(whole)
    cache = hf.TreeCache(whole.config)
    with torch.no_grad():
        whole(IDS, **{hf.CACHE_NAME: cache})
        cache.save(tmp_path / "cache")
        text = hf.from_pretrained(checkpoint)
        loaded = hf.TreeCache.load(tmp_path / "cache", text.config)
        pairs = (whole, cache), (text, loaded)
        logits = [model(IDS[:, :1], **{hf.CACHE_NAME: kept}).logits for model, kept in pairs]
    assert torch.equal(*logits)


def test_prompts_are_not_split() -> None:
    says = "prefill='split' is not possible with Gemma3For.*: it takes images or sound as well as"
    with pytest.raises(ValueError, match=says):
        hf.enable(_whole("Gemma 3"), prefill="split")


def test_layers_that_attend_to_images_are_refused() -> None:
    config = transformers.MllamaConfig()
    says = "TreeCache: layers that attend to images are not supported; 'mllama_text_model' has suc"
    with pytest.raises(ValueError, match=says):
        hf.TreeCache(config)


def test_mistral_large_4_whose_layers_share_keys_is_refused() -> None:
    if "Mistral Large 4" not in NAMES:
        pytest.skip("this release of transformers has no Mistral Large 4")
    config = _whole("Mistral Large 4").config
    config.text_config.kv_source_layers = [0, 0, 2]
    says = "every layer must have keys of its own; 'mistral_large4_text' shares keys between layers"
    with pytest.raises(ValueError, match=says):
        hf.TreeCache(config)


@pytest.mark.parametrize("name", tiers(["Qwen3-VL"], ["MiniMax-M3"]))
def test_the_command_generates(name: str, tmp_path: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(ROOT / "examples/passkey-llama")
    model, prompt = _whole(name, vocab_size=len(tokenizer)), "one two three four five six seven"
    for saved in (model, tokenizer):
        saved.save_pretrained(tmp_path)
    arguments = ["--model", str(tmp_path), "--prompt", prompt, "--max-new-tokens", "6"]
    assert main(["generate", *arguments, "--json", str(tmp_path / "said.json")]) == 0
    given = tokenizer(prompt, return_tensors="pt")
    with stable_choices():
        expected = model.generate(**given, max_new_tokens=6, do_sample=False)
    said = json.loads((tmp_path / "said.json").read_text())
    assert said["tokens"] == expected[0, given["input_ids"].shape[1] :].tolist()


def test_the_planner_knows_the_text(tmp_path: Path) -> None:
    for name in ("MiniMax-M3", "Qwen3-VL"):
        if name in NAMES:
            model = _whole(name)
            model.save_pretrained(tmp_path)
            of_text = sum(x.numel() for x in model.model.language_model.parameters())
            found = find_model(str(tmp_path))
            head = 0 if model.config.tie_word_embeddings else model.lm_head.weight.numel()
            assert found.weights.total == of_text + head
            # Without those for images: 4 bytes a number, and the headers of the file.
            assert 4 <= found.weights.itemsize < 4.3
            assert sum(x.layers for x in found.attention) == 2
