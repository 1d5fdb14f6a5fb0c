# SPDX-License-Identifier: BSD-3-Clause
"""Models to plan: weights and cache as models have them, shapes by name, and what is refused."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from transformers import AutoConfig

from benchmarks.harness.published_shapes import SHAPES
from hf_families import CHOOSING, HYBRIDS, REFUSED, WORKING, Family, make_model
from tiers import tiers_of
from tree_attention import hf
from tree_attention.cli.models import find_model, from_config
from tree_attention.hf import CACHE_NAME
from tree_attention.hf.cache.window import MARGIN, STEP
from tree_attention.hf.options import KV_DTYPES as OF_8_BITS
from tree_attention.planning.arithmetic import SPLIT, SPLIT_BY_HEADS, Plan, Work
from tree_attention.planning.machines import LINKS, MACHINES, Hosts
from tree_attention.planning.models import KV_DTYPES, NAMED
from tree_attention.reference import quantise
from tree_attention.weights.mesh import Mesh
from tree_attention.weights.plan import plan

H100 = Hosts(MACHINES["h100"], LINKS["nvlink"])
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
    name: {**WORKING, **HYBRIDS, **CHOOSING}[name]
    for name in (
        *("Llama", "GPT-BigCode", "Phi-3", "Qwen3-MoE", "Mixtral", "Gemma 3", "Gemma 4", "GPT-OSS"),
        *(
            "DeepSeek-V3",
            "DeepSeek-V3.2",
            "MiniMax-M3",
            "dots3",
            "GLM-5",
            "Granite 4",
            "Jamba",
            "Kimi Linear",
            "Nemotron-H",
            "Qwen3-Next",
        ),
    )
}


QUICK = ("Llama", "Mixtral", "Gemma 3", "DeepSeek-V3", "GLM-5", "Jamba")


@pytest.fixture(scope="module", params=tiers_of(KINDS, quick=QUICK))
def family(request: pytest.FixtureRequest) -> Family:
    return KINDS[request.param]


def test_weights_are_those_of_a_checkpoint(family: Family, tmp_path: Path) -> None:
    model = make_model(family)
    model.save_pretrained(tmp_path)
    planned = find_model(str(tmp_path))
    stored = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert planned.weights.total == parameters
    # With buffers and a header.
    assert planned.weights.num_bytes == pytest.approx(stored, rel=1e-12)
    assert 4 * parameters <= stored
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    assert planned.weights.experts == experts
    assert planned.weights.total > planned.weights.experts


def test_cache_is_as_large_as_a_model_fills_it(family: Family) -> None:
    tokens = 200  # more than a window keeps, fewer than learned positions
    model = make_model(family)
    planned = from_config("tiny", model.config)
    cache = hf.TreeCache(model.config)
    hf.enable(model)
    with torch.no_grad():
        model(torch.ones((1, tokens), dtype=torch.long), **{CACHE_NAME: cache})
    keys = states = 0
    for layer in cache.layers:
        if hasattr(layer, "recurrent_states"):
            held = (*layer.conv_states.values(), *layer.recurrent_states.values())
            states += sum(state.nbytes for state in held if state is not None)
        elif hasattr(layer, "held"):
            # A window's buffers have room for some slots more than they keep.
            used = len(layer.held()) if layer.window is None else None
            buffers = layer.buffers().values()
            each = sum(x.nbytes // x.shape[2] for x in buffers if x.shape[2])
            kept = used or min(layer.window, tokens)
            more = MARGIN + 2 * STEP  # which the plan leaves out
            assert kept <= layer.key_rows.shape[2] and (
                used or layer.key_rows.shape[2] <= kept + more
            )
            keys += each * kept
    found = sum(x.layers * x.token_bytes("bf16") * x.seen(tokens) for x in planned.attention)
    assert keys == 2 * found > 0  # the model is in float32
    # Convolutions have the dtype of the model, other states are float32 in either.
    assert planned.states_bytes <= states <= 2 * planned.states_bytes


@pytest.mark.parametrize(
    ("name", "total"),
    [
        *(("llama-3.2-1b", 1.23), ("llama-3.2-3b", 3.21), ("llama-3.1-8b", 8.03)),
        *(("llama-3.1-70b", 70.6), ("llama-3.1-405b", 405), ("qwen3-30b-a3b", 30.5)),
    ],
)
def test_named_shapes_have_as_many_weights_as_their_model_cards_say(
    name: str, total: float
) -> None:
    assert find_model(name).weights.total / 1e9 == pytest.approx(total, rel=5e-3)


def test_named_llama_is_what_transformers_makes_of_it() -> None:
    config = AutoConfig.for_model(
        "llama",
        **{"hidden_size": 2048, "intermediate_size": 8192, "vocab_size": 128256, "head_dim": 64},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 16},
        tie_word_embeddings=True,
    )
    named = NAMED["llama-3.2-1b"]
    assert from_config(named.name, config) == named


@pytest.mark.deep
def test_named_models_with_experts_are_what_transformers_makes_of_them() -> None:
    shape = SHAPES["qwen3-30b-a3b"]
    fields = {**shape.fields, "num_hidden_layers": shape.published_layers}
    qwen = from_config(shape.title, AutoConfig.for_model("qwen3_moe", **fields))
    assert qwen == NAMED["qwen3-30b-a3b"]
    # Its configuration without arguments is that of the published model.
    glm = from_config("GLM-4.7-Flash", AutoConfig.for_model("glm4_moe_lite"))
    assert glm == NAMED["glm-4.7-flash"]


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
    assert planned["DeepSeek-V3"].attention[0].latent == (32, 8)
    assert planned["DeepSeek-V3"].not_split == "" and planned["DeepSeek-V3"].cut_heads == 4
    assert "linear_attention need every token in order" in planned["Qwen3-Next"].prompts_not_split
    assert planned["Mixtral"].not_split == planned["Mixtral"].prompts_not_split == ""
    # Attention and experts are added up in every layer, shared experts with the others.
    assert planned["Mixtral"].sums == planned["DeepSeek-V3"].sums == 4


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("Granite 4", "model.layers.*.mamba.in_proj, model.layers.*.mamba.out_proj"),
        ("Gemma 4", "model.embed_tokens_per_layer, .* and 1 more"),
        ("GPT-BigCode", "transformer.wpe"),
        ("Llama", None),
    ],
)
def test_what_is_not_cut_is_counted_and_named(name: str, names: str | None) -> None:
    """The bytes of a rank are those of the parts that the library gives it."""
    model = make_model((WORKING | HYBRIDS)[name])
    planned = Plan(from_config(name, model.config), H100, 2, Work(100))
    mesh = Mesh(None, 1)
    mesh.world_size = mesh.context_size = 2  # with tensor_parallel_size 1
    cuts = plan(model, mesh).cuts
    sizes = {
        own: x.numel() // x.shape[cuts[own].dim] * cuts[own].size if own in cuts else x.numel()
        for own, x in model.named_parameters()
    }
    whole = sum(size for own, size in sizes.items() if own not in cuts)
    held = planned.split(SPLIT).weights_bytes
    assert held == pytest.approx(2 * sum(sizes.values()), rel=0.03)  # in granules of 16
    said = [x for x in planned.verdicts() if "are not cut" in x]
    assert len(said) == (names is not None)
    if names is not None:
        of = planned.split(SPLIT_BY_HEADS).weights_bytes
        says = f"{2 * whole / 1e9:,.3g} of {of / 1e9:,.3g} GB of a rank are not cut: {names}."
        assert re.fullmatch(f"With split weights: {says}", said[0]), said


def test_quantized_experts_are_as_large_as_their_files(tmp_path: Path) -> None:
    fields = TINY | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = AutoConfig.for_model("qwen3_moe", **fields)
    whole = from_config("tiny", config).weights
    config.quantization_config = {"quant_method": "awq"}
    others = 2 * (whole.total - whole.experts)
    weights = from_config("tiny", config, others + whole.experts // 2).weights
    assert weights.itemsize == 2 and weights.expert_itemsize == 0.5
    assert weights.num_bytes == others + whole.experts / 2
    model = from_config("tiny", config)
    assert "Qwen3MoeForCausalLM are quantised by 'awq'" in model.not_split
    # These are read as numbers of 16 bits.
    config.quantization_config = {"quant_method": "mxfp4"}
    model = from_config("tiny", config, others)
    assert model.not_split == "" and model.weights.num_bytes == 2 * whole.total


@pytest.mark.parametrize(("dtype", "each"), [("bf16", 2), ("int8", 1), ("int4", 0.515625)])
def test_bytes_of_quantised_weights(dtype: str, each: float) -> None:
    weights = NAMED["llama-3.2-1b"].weights
    matrices = weights.q + weights.kv + weights.split
    expected = each * matrices + 2 * (weights.total - matrices)
    assert weights.quantised(dtype).num_bytes == pytest.approx(expected)


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


def test_sizes_that_contradict_each_other_are_refused_in_one_line() -> None:
    fields = TINY | {"num_attention_heads": 4, "num_key_value_heads": 3}
    config = AutoConfig.for_model("llama", **fields)
    with pytest.raises(ValueError, match=r"tiny cannot be planned: .{3,200}\Z"):
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
        model(torch.ones((1, 5), dtype=torch.long), **{CACHE_NAME: cache})
    (layers,) = from_config("tiny", model.config).attention
    buffers = cache.layers[0].buffers().values()
    assert layers.token_bytes(kv_dtype) == sum(x[:, :, :1].nbytes for x in buffers)


def test_refusals_are_those_of_the_library() -> None:
    known = 0
    for refusal in (each for each in REFUSED if each.applies):
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


@pytest.mark.parametrize(
    "name, says",
    [
        ("DeepSeek-V3", "far='cpu' is not supported with latents"),
        ("MiniMax-M3", "far='cpu' is not supported with an index that chooses keys"),
        ("GPT-OSS", None),
        ("Granite 4", None),
    ],
)
def test_far_keys_are_refused_as_the_library_does(name: str, says: str | None) -> None:
    config = make_model(KINDS[name]).config
    if says is None:
        model = from_config("tiny", config, near_tokens=6)
        assert model.near_tokens == 6 and model.prompts_not_split
        assert replace(from_config("tiny", config), near_tokens=6) == replace(
            model, prompts_not_split=from_config("tiny", config).prompts_not_split
        )
    else:
        with pytest.raises(ValueError, match=f"tiny cannot be planned: TreeCache: {says}"):
            from_config("tiny", config, near_tokens=6)


def test_experts_without_a_number_of_choices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tree_attention.hf.shape._CHOSEN", ("nothing",))
    with pytest.raises(ValueError, match=r"of nothing its config\.json has none"):
        from_config("tiny", make_model(KINDS["Mixtral"]).config)


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"model_type": "nothing"}',
        '{"model_type": "nothing", "auto_map": {"AutoConfig": "code.Config"}}',  # runs no code
        '{"model_type": "llama", "rms_norm_eps": "small"}',
        "[" * 100_000,
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


def test_named_shapes_need_no_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert find_model("llama-3.1-8b") == NAMED["llama-3.1-8b"]


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"llama-9 is no directory .* llama-3\.2-1b, llama"):
        find_model("llama-9")


def test_directories_need_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match=r"needs transformers >= 5\.5: pip install"):
        find_model(str(tmp_path))
