# SPDX-License-Identifier: BSD-3-Clause
"""generation.py: a model generates by tree and by ring, the same tokens."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.harness.places import load_parts
from benchmarks.harness.report import write
from distributed import preload, run_ranks
from lab.emulation import generation
from lab.emulation.generation import RING, TREE

preload("transformers.generation.utils", "transformers.models.llama.modeling_llama")

CONTEXT, TOKENS, LAYERS = 150, 2, 2
NUM_HEADS_KV, HEAD_DIM = 2, 16


def generate(rank: int, world_size: int) -> dict[str, Any]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=NUM_HEADS_KV,
        head_dim=HEAD_DIM,
        attn_implementation="tree_attention",
    )
    with torch.inference_mode():
        model = LlamaForCausalLM(config).eval().bfloat16()
        return generation.run_context(model, CONTEXT, TOKENS)


def test_tree_and_ring_make_the_same_tokens(tmp_path: Path) -> None:
    results = {str(CONTEXT): run_ranks(generate, 2)}
    (row,) = generation.rows_of("lan", 2, results)
    assert row["name"] == "lan p=2 L=150" and not row["wrong"] and len(row["tokens"]) == 1
    # A rank holds 64 to 128 of the keys and sends up to 63 more, the tree one state per layer.
    per_key = LAYERS * 2 * NUM_HEADS_KV * HEAD_DIM * 2
    assert 64 * per_key <= row["methods"][RING]["bytes"] <= 192 * per_key + 1000
    assert row["methods"][TREE]["bytes"] == LAYERS * 4 * 4 * (HEAD_DIM + 1)
    for method in row["methods"].values():
        assert len(method["seconds"]) == 2 * TOKENS and method["p10"] > 0
    part = {"rows": [row], "links": [], "other_load": None, "layers": LAYERS, "costs": None}
    report = generation.report_of({"lan/2": part})
    assert not report.wrong and "2 of 16 layers" in report.title
    write(report, tmp_path)
    assert "| lan p=2 L=150 | ring |" in (tmp_path / "generation.md").read_text()
    assert list(load_parts(tmp_path / "generation.json")) == ["lan/2"]


def test_other_tokens_are_wrong() -> None:
    method = {"tokens": [[1, 2, 3]], "seconds": [0.1, 0.2], "bytes": [5], "exchange_share": [0.5]}
    rank = {TREE: method, RING: method}
    (right,) = generation.rows_of("lan", 2, {"8": [rank, rank]})
    assert not right["wrong"] and right["methods"][TREE]["median"] == pytest.approx(0.15)
    other = {TREE: method, RING: method | {"tokens": [[1, 2, 4]]}}
    (wrong,) = generation.rows_of("lan", 2, {"8": [rank, other]})
    assert wrong["wrong"]
