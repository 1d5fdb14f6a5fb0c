# SPDX-License-Identifier: BSD-3-Clause
"""parallelism.py: its formulas beside what a model sends and holds, its table and its picture."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.harness.results import digest
from benchmarks.pictures import digest_of
from benchmarks.scaling import generate, weights_bytes
from distributed import preload, run_ranks
from hf_families import HYBRIDS, WORKING, make_model
from lab.simulation import parallelism
from tree_attention import hf
from tree_attention.cli.models import from_config
from tree_attention.planning.arithmetic import SPLIT, SPLIT_BY_HEADS, WHOLE, Split, Work
from tree_attention.planning.models import llama

preload("transformers.generation.utils", "transformers.models.llama.modeling_llama")

MODEL = llama("tiny", 3, 64, 128, 8, 4, 512, head_dim=16)
WORK = Work(context=40)


def tiny() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=MODEL.vocab,
        hidden_size=MODEL.hidden,
        intermediate_size=128,
        num_hidden_layers=MODEL.layers,
        num_attention_heads=8,
        num_key_value_heads=MODEL.kv_heads,
        head_dim=16,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).eval().bfloat16()


def run_tiny(rank: int, world_size: int, form: str) -> tuple[int, int, list[int]]:
    """Bytes that a new token sends, bytes of the parameters, and the tokens of the rank."""
    model = tiny()
    split = Split(MODEL, form, world_size, WORK)
    if split.has_split_weights:
        hf.parallelize(model, tensor_parallel_size=split.tensor_parallel_size)
    hf.enable(model, synchronize_logits=False)
    found = generate(model, torch.arange(40)[None], 5)
    return found["bytes"], weights_bytes(model), found["tokens"]


@pytest.mark.parametrize("form", [WHOLE, SPLIT, SPLIT_BY_HEADS])
@pytest.mark.parametrize("world_size", [2, 4])
def test_formulas_are_what_a_model_sends_and_holds(form: str, world_size: int) -> None:
    sent, held, tokens = zip(*run_ranks(run_tiny, world_size, form), strict=True)
    split = Split(MODEL, form, world_size, WORK)
    if form != WHOLE or world_size == 2:  # of more ranks, auto takes a strategy with less to send
        assert max(sent) == split.token_bytes
    # A part of the embedding has a row of zeros for the tokens of other ranks.
    assert max(held) == split.weights_bytes + 2 * MODEL.hidden * split.has_split_weights
    assert len({*map(tuple, tokens)}) == 1


FAMILIES = {name: {**WORKING, **HYBRIDS}[name] for name in ("Qwen3-MoE", "GPT-OSS", "DeepSeek-V3")}
FAMILIES["Qwen3-Next"] = HYBRIDS["Qwen3-Next"]


def run_family(rank: int, world_size: int, name: str, form: str) -> tuple[int, float, int, float]:
    """Bytes that a new token sends, and bytes of the parameters, both counted and by formula."""
    family = FAMILIES[name]
    # A vocabulary and experts that ranks can split evenly.
    even = {"vocab_size": 512, "moe_intermediate_size": 64}
    model = make_model(replace(family, options={**family.options, **even})).bfloat16()
    planned = from_config(name, model.config)
    split = Split(planned, form, world_size, WORK)
    if split.has_split_weights:
        hf.parallelize(model, tensor_parallel_size=split.tensor_parallel_size)
    hf.enable(model, synchronize_logits=False)
    sent = generate(model, torch.arange(40)[None], 5)["bytes"]
    return sent, split.token_bytes, weights_bytes(model), split.weights_bytes


@pytest.mark.parametrize(
    ("name", "form"),
    [
        *((name, WHOLE) for name in FAMILIES),
        *(("Qwen3-MoE", form) for form in (SPLIT, SPLIT_BY_HEADS)),
        ("GPT-OSS", SPLIT_BY_HEADS),
    ],
)
def test_formulas_hold_for_experts_windows_latents_and_states(name: str, form: str) -> None:
    for sent, by_formula, held, planned in run_ranks(run_family, 2, name, form):
        assert sent == by_formula
        zeros = 2 * 64 * (form != WHOLE)  # a row of the embedding
        # Biases of sums, those of 4 experts too, are the first rank's, and the formula gives each
        # its part: in 2 layers, of 64 columns of 2 bytes.
        assert abs(held - planned - zeros) <= 2 * 5 * 64 * 2


def test_every_piece_is_held() -> None:
    for size in (1, 2, 4):
        ranks = [parallelism.pieces(4, rank, size) for rank in range(4)]
        for name in ranks[0]:
            count = ranks[0][name][0]
            assert {held[name][1] for held in ranks} == set(range(count)), name
        # No two ranks have the same heads and the same tokens.
        assert len({(held["cache: heads"], held["cache: tokens"]) for held in ranks}) == 4


def test_table_and_picture(tmp_path: Path) -> None:
    lines = parallelism.table().splitlines()
    assert len(lines) == 2 + 2 * 3 * 4 and len({line.count("|") for line in lines}) == 1
    docs = Path(__file__).parents[3] / "docs"
    page = (docs / "parallelism.md").read_text()
    (tmp_path / "parallelism.md").write_text(page.replace(lines[2], ""))
    assert parallelism.main(["--out", str(tmp_path)]) == 0
    remedy = "run: python -m lab.simulation.parallelism"
    assert (tmp_path / "parallelism.md").read_text() == page, remedy
    for folder in (docs, tmp_path):
        shown = digest_of(folder / "parallelism.svg")
        assert shown == digest(parallelism.who_holds_what())
