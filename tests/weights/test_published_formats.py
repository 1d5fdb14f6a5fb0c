# SPDX-License-Identifier: BSD-3-Clause
"""Checkpoints in FP8 blocks and MXFP4, and experts one by one, some of them lost.

The mistakes these tests are for: the halves of a byte exchanged, a block's scale that is taken for
its neighbour's where a slice begins inside a block, an expert that is lost without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from distributed import run_ranks
from tiers import tiers_of

pytest.importorskip("transformers")

from transformers import AutoConfig

from generations import generated, greedy, left_padded, same_on_all_ranks
from hf_families import CHOOSING, VOCAB_SIZE, WORKING, make_model, sizes_of_tensor_groups
from published import publish_deepseek_v32, publish_fp8, publish_minimax_m3, write
from tree_attention import ExchangeError, hf
from tree_attention.weights import load as loading
from tree_attention.weights.checkpoint.formats import Fp8Blocks, Mxfp4
from tree_attention.weights.text import class_to_load

FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


@pytest.mark.parametrize("shape", [(300, 200), (2, 130, 128)])
def test_fp8_blocks(shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape).to(torch.float8_e4m3fn)
    rows, columns = shape[-2:]
    scales = torch.rand(*shape[:-2], -(-rows // 128), -(-columns // 64)) + 0.5
    expected = weight.float().clone()
    for i in range(rows):
        for j in range(columns):
            expected[..., i, j] *= scales[..., i // 128, j // 64]
    source = Fp8Blocks(weight, scales, (128, 64))
    assert torch.equal(source.whole(), expected.bfloat16())
    part = torch.empty(*shape[:-2], 100, 90)
    source.copy_to(part, [*(0 for _ in shape[:-2]), 30, 35])
    assert torch.equal(part, expected[..., 30:130, 35:125])


def test_mxfp4() -> None:
    blocks = torch.randint(0, 256, (3, 10, 2, 16), dtype=torch.uint8)
    scales = torch.randint(120, 134, (3, 10, 2), dtype=torch.uint8)
    expected = torch.empty(3, 64, 10)
    for e in range(3):
        for row in range(10):
            for column in range(64):
                byte = int(blocks[e, row, column // 32, column % 32 // 2])
                number = FP4[byte & 15 if column % 2 == 0 else byte >> 4]
                expected[e, column, row] = number * 2.0 ** (int(scales[e, row, column // 32]) - 127)
    source = Mxfp4(blocks, scales)
    assert source.shape == (3, 64, 10)
    assert torch.equal(source.whole().float(), expected)
    part = torch.empty(2, 30, 7)
    source.copy_to(part, [1, 16, 2])
    assert torch.equal(part, expected[1:, 16:46, 2:9])


def test_mxfp4_is_what_transformers_reads() -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    blocks = torch.randint(0, 256, (2, 6, 3, 16), dtype=torch.uint8)
    scales = torch.randint(120, 134, (2, 6, 3), dtype=torch.uint8)
    expected = mxfp4.convert_moe_packed_tensors(blocks, scales)
    assert torch.equal(Mxfp4(blocks, scales).whole(), expected)


def _publish_mxfp4(path: Path) -> None:
    """Write GPT-OSS as it is published: experts in MXFP4, which has groups of 32 inputs."""
    make_model(WORKING["GPT-OSS"]).save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        shape = experts, rows, columns // 32
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(122, 126, shape, dtype=torch.uint8)
    write(path, tensors, {"quant_method": "mxfp4"})


PUBLISHED: dict[str, Callable[[Path], None]] = {
    "DeepSeek-V3": publish_fp8,
    "GPT-OSS": _publish_mxfp4,
}
WITH_INDEX: dict[str, Callable[[Path], None]] = {
    "DeepSeek-V3.2": publish_deepseek_v32,
    "MiniMax-M3": publish_minimax_m3,
}
PUBLISHED |= {name: x for name, x in WITH_INDEX.items() if CHOOSING[name].exists}


def _prompts(name: str) -> dict[str, Tensor]:
    """Longer than what an index chooses."""
    length, paddings = (37, (0, 0)) if name in WITH_INDEX else (13, (0, 5))
    return left_padded(VOCAB_SIZE, length, paddings, seed=4)


def _generate(rank: int, world_size: int, path: Path, name: str) -> list[Tensor]:
    return [
        x
        for size in sizes_of_tensor_groups(name, world_size)
        for weights in (None, "int8")
        for x in generated(
            hf.from_pretrained(
                path, tensor_parallel_size=size, dtype=torch.float32, weights=weights
            ),
            _prompts(name),
            **greedy(6),
        )[:2]
    ]


@pytest.mark.parametrize("name", tiers_of(PUBLISHED, quick=["DeepSeek-V3"]))
def test_split_weights_equal_whole_ones(name: str, tmp_path: Path) -> None:
    """Read by slices on two ranks, and quantised anew, they say what one rank says."""
    PUBLISHED[name](tmp_path)
    ranks = run_ranks(_generate, 2, tmp_path, name)
    same_on_all_ranks(ranks)
    found = iter(ranks[0])
    wanted = {
        weights: generated(
            hf.from_pretrained(tmp_path, dtype=torch.float32, weights=weights),
            _prompts(name),
            **greedy(6),
        )
        for weights in (None, "int8")
    }
    for _ in sizes_of_tensor_groups(name, 2):
        for tokens, logits, margin in wanted.values():
            assert torch.equal(next(found), tokens)
            assert (next(found) - logits).abs().max().item() < margin / 5


def test_numbers_are_those_of_the_file(tmp_path: Path) -> None:
    publish_fp8(tmp_path)
    model = hf.from_pretrained(tmp_path, dtype=torch.float32)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    weight, scale = tensors[name].float(), tensors[f"{name}_scale_inv"]
    wide = scale.repeat_interleave(32, 0).repeat_interleave(32, 1)
    expected = weight * wide[: weight.shape[0], : weight.shape[1]]
    assert torch.equal(model.get_parameter(name), expected)


@pytest.mark.parametrize(
    "name",
    tiers_of(
        [x for x in PUBLISHED if x in WITH_INDEX], [x for x in PUBLISHED if x == "DeepSeek-V3.2"]
    ),
)
def test_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Which reads the same numbers from files without scales."""
    PUBLISHED[name](tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    scales = {x: tensors.pop(x) for x in [*tensors] if x.endswith("_scale_inv")}
    for scale, factors in scales.items():
        weight = scale.removesuffix("_scale_inv")
        wide = factors.repeat_interleave(32, 0).repeat_interleave(32, 1)
        x = tensors[weight].float()
        tensors[weight] = x * wide[: x.shape[0], : x.shape[1]]
    assert any("wq_b" in x or "index_q_proj" in x for x in scales)
    found = generated(
        hf.from_pretrained(tmp_path, dtype=torch.float32), _prompts(name), **greedy(12)
    )
    write(tmp_path, tensors, {})
    kind = class_to_load(AutoConfig.from_pretrained(tmp_path))
    model = kind.from_pretrained(tmp_path, dtype=torch.float32).eval()
    tokens, logits, margin = generated(model, _prompts(name), **greedy(12))
    assert torch.equal(found[0], tokens)
    assert (found[1] - logits).abs().max().item() < margin / 10


def _change(path: Path, name: str, change: str) -> None:
    tensors = load_file(path / "model.safetensors")
    if change == "lost":
        del tensors[name]
    elif change == "smaller":
        tensors[name] = tensors[name][:-1].contiguous()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("family", "name", "change", "says"),
    [
        (
            "Qwen3-MoE",
            "model.layers.1.mlp.experts.2.up_proj.weight",
            "lost",
            "lacks .*model.layers.1.mlp.experts.2.up_proj.weight",
        ),
        (
            "Mixtral",
            "model.layers.0.block_sparse_moe.experts.3.w2.weight",
            "lost",
            "lacks .*model.layers.0.block_sparse_moe.experts.3.w2.weight",
        ),
        (
            "Qwen3-MoE",
            "model.layers.0.mlp.experts.1.gate_proj.weight",
            "smaller",
            r"model.layers.0.mlp.experts.gate_up_proj .* shapes \[47, 64\] and \[48, 64\]",
        ),
    ],
)
def test_damaged_experts(family: str, name: str, change: str, says: str, tmp_path: Path) -> None:
    make_model(WORKING[family]).save_pretrained(tmp_path)
    _change(tmp_path, name, change)
    with pytest.raises(ValueError, match=says):
        hf.from_pretrained(tmp_path)


def _refused(rank: int, world_size: int, path: Path, says: str) -> None:
    with (
        mock.patch.object(loading, "_fill", side_effect=AssertionError("allocated")),
        pytest.raises((ValueError, ExchangeError), match=says),
    ):
        hf.from_pretrained(path, tensor_parallel_size=world_size, weights="int8")


def test_a_lost_expert_on_all_ranks_before_anything_is_allocated(tmp_path: Path) -> None:
    make_model(WORKING["Qwen3-MoE"]).save_pretrained(tmp_path)
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    _change(tmp_path, name, "lost")
    run_ranks(_refused, 2, tmp_path, f"lacks the weights {name}")


@pytest.mark.parametrize("name", PUBLISHED)
def test_damaged_scales(name: str, tmp_path: Path) -> None:
    PUBLISHED[name](tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    scales = next(x for x in tensors if x.endswith(("_scale_inv", "_scales")))
    _change(tmp_path, scales, "smaller")
    weight = scales.removesuffix("_scale_inv").removesuffix("_scales")
    with pytest.raises(ValueError, match=f"{weight}.*scales"):
        hf.from_pretrained(tmp_path)


def test_scales_that_are_lost(tmp_path: Path) -> None:
    """The numbers without them are no weights."""
    publish_fp8(tmp_path)
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    _change(tmp_path, f"{name}_scale_inv", "lost")
    with pytest.raises(ValueError, match=f"{name}: it is of FP8 and lacks its scales, {name}_sc"):
        hf.from_pretrained(tmp_path)


def test_integers_without_a_scheme(tmp_path: Path) -> None:
    make_model(WORKING["Llama"]).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = (tensors[name] * 100).to(torch.int8)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"{name} must be of a floating dtype, got torch.int8"):
        hf.from_pretrained(tmp_path)
