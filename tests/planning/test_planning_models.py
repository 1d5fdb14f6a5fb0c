# SPDX-License-Identifier: BSD-3-Clause
"""Models to plan: weights and cache as models have them, shapes by name, and what is refused."""

from __future__ import annotations

import json
import struct
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hf_families import HYBRIDS, REFUSED, WORKING, Family, make_model
from tree_attention import hf
from tree_attention.hf.cache.kv_dtypes import KV_DTYPES as OF_8_BITS
from tree_attention.hf.cache.window import STEP
from tree_attention.planning.models import KV_DTYPES, NAMED
from tree_attention.planning.reading import CONFIGS, chosen_experts, find_model, from_config
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
# A family of each kind: dense, with experts, windows, latents, and layers with a state.
KINDS = {
    name: {**WORKING, **HYBRIDS}[name]
    for name in (
        *("Llama", "GPT-BigCode", "Phi-3", "Qwen3-MoE", "Mixtral", "Gemma 3", "Gemma 4", "GPT-OSS"),
        *("DeepSeek-V3", "Granite 4", "Jamba", "Kimi Linear", "Nemotron-H", "Qwen3-Next"),
    )
}


@pytest.fixture(scope="module", params=KINDS)
def family(request: pytest.FixtureRequest) -> Family:
    return KINDS[request.param]


def test_weights_are_those_of_a_checkpoint(family: Family, tmp_path: Path) -> None:
    model = make_model(family)
    model.save_pretrained(tmp_path)
    planned = find_model(str(tmp_path))
    stored = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert planned.weights.total == parameters
    # With buffers, and behind a header.
    tensors = {x.data_ptr(): x.nbytes for x in model.state_dict().values()}
    assert planned.weights.num_bytes == pytest.approx(sum(tensors.values()), rel=1e-12)
    assert 4 * parameters <= planned.weights.num_bytes <= stored
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    assert planned.weights.experts == experts
    assert planned.weights.total - planned.weights.experts >= planned.weights.dense > 0


def test_cache_is_as_large_as_a_model_fills_it(family: Family) -> None:
    tokens = 200  # more than a window keeps, fewer than learned positions
    model = make_model(family)
    planned = from_config("tiny", model.config)
    cache = hf.TreeCache(model.config)
    hf.enable(model)
    with torch.no_grad():
        model(torch.ones((1, tokens), dtype=torch.long), past_key_values=cache)
    keys = states = 0
    for layer in cache.layers:
        if hasattr(layer, "recurrent_states"):
            held = (*layer.conv_states.values(), *layer.recurrent_states.values())
            states += sum(state.nbytes for state in held if state is not None)
        elif hasattr(layer, "held"):
            # A window's buffers have room for some slots more than they keep.
            used = len(range(tokens)[layer.held()]) if layer.window is None else None
            buffers = layer.buffers().values()
            each = sum(x.nbytes // x.shape[2] for x in buffers if x.shape[2])
            kept = used or min(layer.window + 128, tokens)
            assert kept <= layer.keys.shape[2] and (used or layer.keys.shape[2] <= kept + STEP)
            keys += each * kept
    found = sum(x.layers * x.token_bytes("bf16") * x.kept(tokens) for x in planned.attention)
    assert keys == 2 * found > 0  # the model is in float32
    # Convolutions have the dtype of the model, other states are float32 in either.
    assert planned.states_bytes <= states <= 2 * planned.states_bytes
    assert (states > 0) == (planned.state_layers > 0)


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        *(("llama-3.2-1b", 1.23, 1.23), ("llama-3.2-3b", 3.21, 3.21), ("llama-3.1-8b", 8.03, 7.5)),
        *(("llama-3.1-70b", 70.6, 69.5), ("llama-3.1-405b", 405, 403.7)),
        *(("qwen3-30b-a3b", 30.5, 3.04), ("qwen3-235b-a22b", 235, 21.6)),
        *(("gpt-oss-20b", 20.9, 3.6), ("gpt-oss-120b", 117, 5.1), ("gemma-3-27b", 27.0, 27.0)),
        *(("deepseek-v3", 671, 36.6), ("qwen3-next-80b-a3b", 79.7, 3.56)),
        ("granite-4.0-h-small", 32.2, 8.8),
    ],
)
def test_named_shapes_have_as_many_weights_as_their_model_cards_say(
    name: str, total: float, active: float
) -> None:
    """Model cards may count the embedding among the weights that a token needs; here it is none."""
    weights = find_model(name).weights
    assert weights.total / 1e9 == pytest.approx(total, rel=5e-3)
    assert weights.active / 1e9 == pytest.approx(active, rel=1e-2)


def test_experts_in_mxfp4_take_what_the_checkpoint_does() -> None:
    model = find_model("gpt-oss-120b")
    assert model.weights.num_bytes / 1e9 == pytest.approx(65.2, rel=5e-3)
    assert model.not_split == "GptOssForCausalLM cannot be split: it has a quantization_config"


def test_named_llama_is_what_transformers_makes_of_it() -> None:
    config = AutoConfig.for_model(
        "llama",
        **{"hidden_size": 2048, "intermediate_size": 8192, "vocab_size": 128256, "head_dim": 64},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 16},
        tie_word_embeddings=True,
    )
    named = NAMED["llama-3.2-1b"]
    assert from_config(named.name, config) == named


def test_distinct_experts_of_several_tokens() -> None:
    weights = replace(NAMED["llama-3.2-1b"].weights, experts=1000, num_experts=8, chosen=2)
    assert weights.share_of_experts(1) == 2 / 8
    drawn = torch.rand(20_000, 3, 8, generator=torch.Generator().manual_seed(0)).topk(2).indices
    hit = torch.zeros(20_000, 8).scatter_(1, drawn.flatten(1), 1.0).mean().item()
    assert weights.share_of_experts(3) == pytest.approx(hit, rel=1e-2)
    assert weights.share_of_experts(1000) == pytest.approx(1)


def test_windows_layers_and_limits_are_those_of_the_library() -> None:
    planned = {name: from_config(name, make_model(KINDS[name]).config) for name in KINDS}
    assert [x.window for x in planned["GPT-OSS"].attention] == [8, None]
    assert planned["GPT-OSS"].attention[0].kept(1 << 20) == 8 + 128
    assert planned["DeepSeek-V3"].attention[0].latent == (32, 8)
    assert "latents" in planned["DeepSeek-V3"].not_split
    assert "linear_attention need every token in order" in planned["Qwen3-Next"].not_dealt
    assert not planned["Jamba"].may_be_chunked and planned["Qwen3-Next"].may_be_chunked
    assert planned["Mixtral"].not_split == planned["Mixtral"].not_dealt == ""
    # Attention is added up in every layer, and experts, which are whole, in none.
    assert planned["Mixtral"].sums == planned["Mixtral"].layers == 2


def tiny_checkpoint(path: Path) -> dict[str, int]:
    """Bytes of the tensors of two files with an index, by the tensors' names."""
    config = AutoConfig.for_model(
        "qwen3_moe", **TINY, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(path, max_shard_size="60KB")
    assert len(list(path.glob("*.safetensors"))) > 1
    return {name: parameter.nbytes for name, parameter in model.named_parameters()}


def test_weights_are_as_large_as_files_and_index_say(tmp_path: Path) -> None:
    sizes = tiny_checkpoint(tmp_path)
    weights = find_model(str(tmp_path)).weights
    assert weights.itemsize == weights.expert_itemsize == 2
    assert weights.num_bytes == sum(sizes.values())
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["metadata"]["total_size"] = 3 * weights.total
    index.write_text(json.dumps(content))
    next(tmp_path.glob("*.safetensors")).unlink()  # as long as not all of it is there
    assert find_model(str(tmp_path)).weights.num_bytes == 3 * weights.total


def test_layers_that_are_not_loaded_do_not_count(tmp_path: Path) -> None:
    family = KINDS["DeepSeek-V3"]
    model = make_model(family)
    model.save_pretrained(tmp_path)
    from safetensors.torch import load_file, save_file

    file = tmp_path / "model.safetensors"
    extra = {"model.layers.61.eh_proj.weight": torch.zeros(100, 100)}
    save_file(load_file(file) | extra, file, {"format": "pt"})
    found = find_model(str(tmp_path)).weights.num_bytes
    assert found == pytest.approx(sum(x.nbytes for x in model.state_dict().values()))


def test_damaged_checkpoints_are_refused(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    next(tmp_path.glob("*.safetensors")).write_bytes(b"1234")
    with pytest.raises(
        ValueError, match=r"cannot be read: .* has a header of 875,770,417 bytes, of at"
    ):
        find_model(str(tmp_path))


DEEP = b"[" * 100_000
HEADERS = {
    **{f"a length of {length}": (length, b"{}") for length in (3, 1 << 40, 1 << 62, (1 << 64) - 1)},
    **{
        text.decode()[:40]: (len(text), text)
        for text in (
            *(b"[]", b"null", b"3", b'{"a": 3}', DEEP),
            *(
                b'{"a": {"data_offsets": %b}}' % offsets
                for offsets in (b"null", b'["0", "4"]', b"[4, 0]", b"[0, NaN]", b"[0, 1e300]")
            ),
            b'{"a": {"data_offsets": [0, 1%b]}}' % (b"0" * 400),
        )
    },
}


@pytest.mark.parametrize("header", HEADERS)
def test_damaged_headers_are_refused_in_one_line(tmp_path: Path, header: str) -> None:
    tiny_checkpoint(tmp_path)
    length, text = HEADERS[header]
    next(tmp_path.glob("*.safetensors")).write_bytes(struct.pack("<Q", length) + text)
    with pytest.raises(ValueError, match=r"its safetensors files cannot be read: .+\Z"):
        find_model(str(tmp_path))


@pytest.mark.parametrize(
    "index",
    [
        *("[]", "null", '{"weight_map": []}', '{"weight_map": {"a": 3}}', DEEP.decode()),
        *(
            f'{{"weight_map": {{"a": "b"}}, "metadata": {metadata}}}'
            for metadata in ("null", '{"total_size": -1}', '{"total_size": Infinity}')
        ),
    ],
)
def test_damaged_indices_are_refused_in_one_line(tmp_path: Path, index: str) -> None:
    tiny_checkpoint(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ValueError, match=r"its safetensors files cannot be read: .+\Z"):
        find_model(str(tmp_path))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        *(
            ({"num_hidden_layers": n}, "num_hidden_layers must be an integer of 1 to 1,000, got ")
            for n in (10**6, 10**18, 1001, 0, -3, "12", True, 1.5)
        ),
        *(
            ({field: n}, f"{field} must be an integer of 1 to 10,000, got {n}")
            for field in ("num_attention_heads", "num_key_value_heads", "head_dim")
            for n in (0, -1, 1 << 70)
        ),
        ({"hidden_size": 0}, "hidden_size must be an integer of 1 to 16,777,216, got 0"),
        ({"intermediate_size": [16, -16]}, "intermediate_size must be an integer of 1 to 16,77"),
        ({"text_config": {"vocab_size": -1}}, "vocab_size must be an integer of 1 to 16,777,216"),
        ({"num_experts": 10**9}, "num_experts must be an integer of -10,000 to 10,000, got 1000"),
        ({"seed": 10**30}, "seed must be an integer of -9,223,372,036,854,775,807 to 9,223,372"),
    ],
)
def test_sizes_that_no_model_has_are_refused(
    tmp_path: Path, fields: dict[str, object], reason: str
) -> None:
    """Before anything is built: a million layers would take hours."""
    AutoConfig.for_model("llama", **TINY).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    with (
        mock.patch.object(AutoConfig, "from_pretrained", side_effect=AssertionError),
        pytest.raises(ValueError, match=f"the configuration {file}: {reason}"),
    ):
        find_model(str(tmp_path))


def test_sizes_that_contradict_each_other_are_refused_in_one_line(tmp_path: Path) -> None:
    fields = TINY | {"num_attention_heads": 4, "num_key_value_heads": 3}
    config = AutoConfig.for_model("llama", **fields)
    with pytest.raises(ValueError, match=r"contradict each other: .{3,200}\Z"):
        from_config("tiny", config)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_keys_and_values_are_as_large_as_they_are_cached(kv_dtype: str) -> None:
    (layers,) = NAMED["llama-3.2-1b"].attention
    x = torch.randn(1, layers.kv_heads, 1, layers.key, dtype=torch.bfloat16)
    cached = [x] if kv_dtype == "bf16" else quantise(x, OF_8_BITS[kv_dtype])
    assert layers.token_bytes(kv_dtype) == 2 * sum(tensor.nbytes for tensor in cached)


@pytest.mark.parametrize("kv_dtype", OF_8_BITS)
def test_latents_of_8_bits_are_as_large_as_they_are_cached(kv_dtype: str) -> None:
    model = make_model(KINDS["DeepSeek-V3"])
    cache = hf.TreeCache(model.config, kv_dtype=kv_dtype)
    hf.enable(model)
    with torch.no_grad():
        model(torch.ones((1, 5), dtype=torch.long), past_key_values=cache)
    (layers,) = from_config("tiny", model.config).attention
    buffers = cache.layers[0].buffers().values()
    assert layers.token_bytes(kv_dtype) == sum(x[:, :, :1].nbytes for x in buffers)


def test_refusals_are_those_of_the_library() -> None:
    known = 0
    for refusal in REFUSED:
        for name, family in refusal.families.items():
            if family.config in ("DiffLlamaConfig", "DogeConfig", "JetMoeConfig"):
                continue  # of these, the first forward pass tells
            config = make_model(family).config
            says = "chunked_attention" if "chunk" in refusal.says else refusal.says
            with pytest.raises(ValueError, match=f"tiny cannot be planned: .*{says}"):
                from_config("tiny", config)
            known += 1
            assert name
    assert known > 10


def test_experts_without_a_number_of_choices_are_refused() -> None:
    with pytest.raises(ValueError, match=r"of num_experts_per_tok, .* config\.json has none"):
        chosen_experts("tiny", AutoConfig.for_model("llama"))


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"model_type": "nothing"}',
        '{"model_type": "nothing", "auto_map": {"AutoConfig": "code.Config"}}',  # runs no code
        '{"model_type": "llama", "rms_norm_eps": "small"}',
        DEEP.decode(),
    ],
)
def test_damaged_configurations_are_refused_in_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=rf"{tmp_path}/config\.json(:| cannot be read:) .+\Z"):
        find_model(str(tmp_path))


def test_sizes_are_positive() -> None:
    config = AutoConfig.for_model("llama", **(TINY | {"num_hidden_layers": 0}))
    with pytest.raises(ValueError, match=r"tiny cannot be planned: .* a layer must have keys"):
        from_config("tiny", config)


def test_named_shapes_need_transformers_unless_they_are_llamas(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert find_model("llama-3.1-8b") == NAMED["llama-3.1-8b"]
    for name in CONFIGS:
        with pytest.raises(ValueError, match="reading this shape needs transformers: pip install"):
            find_model(name)


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"llama-9 is no directory .* llama-3\.2-1b, llama"):
        find_model("llama-9")


def test_directories_need_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match=r"needs transformers: pip install 'tree-attention\[hf\]'"):
        find_model(str(tmp_path))
