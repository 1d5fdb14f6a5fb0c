# SPDX-License-Identifier: BSD-3-Clause
"""Weights of 8 and 4 bits: numbers, products and tokens, whole and split.

The mistakes these tests are for: scales of a rank's part instead of the whole row's, a group of 4
bits that begins where another rank's slice ends, experts whose rows are mixed up, a sum of padding.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from distributed import run_ranks
from tiers import tiers_of

pytest.importorskip("transformers")

from generations import generated, greedy, left_padded, same_on_all_ranks
from hf_families import HYBRIDS, VOCAB_SIZE, WORKING, make_model, sizes_of_tensor_groups
from pairwise import each_pair
from quantised_numbers import DTYPES, TOLERANCE, numbers_of
from tree_attention import hf
from tree_attention.weights.parts import Cut, OfFile
from tree_attention.weights.quantised import SCHEMES, Matrix, QuantisedLinear, product


def check_product(
    matrix: Matrix, numbers: Tensor, scheme: str, dtype: torch.dtype, tokens: int
) -> None:
    made = matrix.quantised(scheme, dtype)
    x = torch.randn(tokens, numbers.shape[1], generator=torch.Generator().manual_seed(1)).to(dtype)
    found = product(x, made.data, made.scale, made.front)
    expected = x.double() @ numbers.double().T
    assert found.dtype == dtype and found.shape == expected.shape
    largest = expected.abs().max().item() if expected.numel() else 0.0
    torch.testing.assert_close(
        found.double(), expected, rtol=0.0, atol=TOLERANCE[dtype] * max(largest, 1e-30)
    )


@pytest.mark.parametrize(
    "scheme, dtype",
    tiers_of(itertools.product(SCHEMES, DTYPES), [("int4", torch.bfloat16)]),
)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_parts_are_those_of_the_whole(scheme: str, dtype: torch.dtype, data: Any) -> None:
    """Any slice of either axis, also an empty one, has the numbers that it has in the whole."""
    outputs, inputs = (data.draw(st.integers(1, 20)) * 16 for _ in range(2))
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(outputs)) * 3
    weight[: outputs // 3] *= 1e-3
    weight[-1] = 0.0
    numbers = numbers_of(weight, scheme, dtype)
    tokens = data.draw(st.sampled_from([1, 3, 40]))
    dim = data.draw(st.sampled_from([0, 1]))
    begin, end = sorted(data.draw(st.integers(0, weight.shape[dim] // 16)) * 16 for _ in range(2))
    cut = Cut(dim, ((begin, end),))
    part = numbers.narrow(dim, begin, end - begin)
    check_product(Matrix(OfFile(weight), cut), part, scheme, dtype, tokens)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_both_halves_of_a_packed_projection(scheme: str) -> None:
    weight = torch.randn(96, 64)
    cut = Cut(0, ((16, 32), (64, 80)))
    numbers = numbers_of(weight, scheme, torch.float32)
    both = torch.cat((numbers[16:32], numbers[64:80]))
    check_product(Matrix(OfFile(weight), cut), both, scheme, torch.float32, 3)


def test_sums_of_integers_fit_in_float16() -> None:
    """Of so many tokens that the weights are widened."""
    matrix = Matrix(OfFile(torch.full((16, 64), 0.01)), None)
    made = matrix.quantised("int8", torch.float16)
    found = product(torch.full((40, 64), 100.0).half(), made.data, made.scale)
    torch.testing.assert_close(found.float(), torch.full((40, 16), 64.0), rtol=2e-3, atol=0)


FAMILIES = {
    name: (WORKING | HYBRIDS)[name]
    for name in ("Llama", "Qwen3-MoE", "GPT-OSS", "DeepSeek-V3", "Phi-3", "Qwen3-Next", "GLM-4.5")
}


def _prompts() -> dict[str, Tensor]:
    return left_padded(VOCAB_SIZE, 40, (0, 5), seed=4)  # more tokens than a widened copy pays from


def _shares(groups: int) -> list[int]:
    """Of tensor groups, one of which has empty slices of all matrices and experts."""
    return [3, 0, 1, 2][:groups]


def _tokens(
    rank: int, world_size: int, path: Path, scheme: str, unequal: bool, names: Sequence[str]
) -> list[tuple[Tensor, Tensor]]:
    found = []
    for name in names:
        for size in sizes_of_tensor_groups(name, world_size):
            shares = [x for x in _shares(world_size // size) for _ in range(size)]
            model = hf.from_pretrained(
                path / name,
                tensor_parallel_size=size,
                weights=scheme,
                shares=shares if unequal else None,
            )
            found.append(generated(model, _prompts(), **greedy(6))[:2])
    return found


NAMES = [*FAMILIES]
WAYS = each_pair(itertools.product(SCHEMES, (2, 3, 4), (False, True)))
SOME = [("int8", 2, False, NAMES[::2]), ("int4", 2, True, NAMES[1::2])]


@pytest.mark.deep
@pytest.mark.parametrize(
    "scheme, world_size, unequal, names", [*SOME, *((*way, NAMES) for way in WAYS)]
)
def test_tokens_equal_those_of_one_process(
    scheme: str, world_size: int, unequal: bool, names: Sequence[str], tmp_path: Path
) -> None:
    """With the same weights, and the same bits on all ranks."""
    for name in names:
        make_model(FAMILIES[name]).save_pretrained(tmp_path / name)
    ranks = run_ranks(_tokens, world_size, tmp_path, scheme, unequal, names)
    same_on_all_ranks([[logits for _, logits in found] for found in ranks])
    found = iter(ranks[0])
    for name in names:
        model = hf.from_pretrained(tmp_path / name, weights=scheme)
        tokens, logits, margin = generated(model, _prompts(), **greedy(6))
        plain = generated(make_model(FAMILIES[name]), _prompts(), **greedy(6))[1]
        assert not torch.allclose(logits[0], plain[0], atol=1e-3), f"{name} is not quantised"
        for size in sizes_of_tensor_groups(name, world_size):
            split_tokens, split_logits = next(found)
            error = (split_logits - logits).abs().max().item()
            assert error < margin / 5, f"{name}, {size}: {error}, the best two by {margin}"
            assert torch.equal(split_tokens, tokens), (name, size)


def test_what_cannot_be_quantised(tmp_path: Path) -> None:
    make_model(WORKING["GPT-2"]).save_pretrained(tmp_path / "gpt2")
    make_model(WORKING["Llama"]).save_pretrained(tmp_path / "llama")
    for arguments, says in (
        ({"weights": "int2"}, "weights must be one of int8, int4 or None, got 'int2'"),
        ({"weights": 8}, "weights must be one of int8, int4 or None, got 8"),
        ({"weights": "int8", "device": "cuda"}, "weights='int8' is for the CPU, got device cuda"),
    ):
        with pytest.raises(ValueError, match=says):
            hf.from_pretrained(tmp_path / "llama", **arguments)
    with pytest.raises(ValueError, match=r"GPT2LMHeadModel has no torch\.nn\.Linear"):
        hf.from_pretrained(tmp_path / "gpt2", weights="int4")
    model = hf.from_pretrained(tmp_path / "llama", weights="int8")
    with pytest.raises(ValueError, match=r"is split already"):
        hf.parallelize(model)
    found = "the weights of this LlamaForCausalLM were quantised by from_pretrained"
    with pytest.raises(NotImplementedError, match=f"save_pretrained: {found}"):
        model.save_pretrained(tmp_path / "saved")
    with pytest.raises(NotImplementedError, match=f"set_experts_implementation: {found}"):
        model.set_experts_implementation("eager")


def test_what_keeps_its_dtype(tmp_path: Path) -> None:
    make_model(WORKING["DeepSeek-V3"]).save_pretrained(tmp_path)
    model = hf.from_pretrained(tmp_path, weights="int8", dtype=torch.bfloat16)
    kept = {name for name, x in model.named_parameters() if x.is_floating_point()}
    kept = {name for name in kept if not name.endswith(("norm.weight", "scale"))}
    routers = {f"model.layers.{i}.mlp.gate.weight" for i in (1,)}
    latents = {f"model.layers.{i}.self_attn.kv_b_proj.weight" for i in (0, 1)}
    assert kept == {"model.embed_tokens.weight", "lm_head.weight", *routers, *latents}


@pytest.mark.deep
def test_a_compiled_forward(tmp_path: Path) -> None:
    """Of dense and sparse layers, one graph has the logits of the uncompiled model."""
    for name, scheme in (("Llama", "int8"), ("Qwen3-MoE", "int4"), ("Qwen3-MoE", None)):
        family = FAMILIES[name]  # a second layer of the same kind takes as long to compile
        one_layer = replace(family, options=family.options | {"num_hidden_layers": 1})
        make_model(one_layer).save_pretrained(tmp_path / name)
        model = hf.from_pretrained(tmp_path / name, weights=scheme, max_length=64)
        expected = generated(model, _prompts(), **greedy(6))
        torch.compiler.reset()
        model.forward = torch.compile(model.forward, backend="aot_eager", fullgraph=True)
        found = generated(model, _prompts(), **greedy(6))
        assert torch.equal(found[0], expected[0])
        torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("weights", tiers_of([None, *SCHEMES], ["int8"]))
@torch.no_grad()
def test_default_device_is_not_the_models(weights: str | None, tmp_path: Path) -> None:
    make_model(WORKING["Qwen3-MoE"]).save_pretrained(tmp_path)
    ids = _prompts()["input_ids"]
    expected = hf.from_pretrained(tmp_path, weights=weights)(ids, use_cache=False).logits
    with torch.device("meta"):
        model = hf.from_pretrained(tmp_path, weights=weights)
        found = [
            linear(torch.ones(2, linear.in_features, device="cpu")) for linear in _linears(model)
        ]
    assert torch.equal(model(ids, use_cache=False).logits, expected)
    assert all(x.device.type == "cpu" and x.isfinite().all() for x in found)


def _linears(model: torch.nn.Module) -> list[QuantisedLinear]:
    return [module for module in model.modules() if isinstance(module, QuantisedLinear)]
