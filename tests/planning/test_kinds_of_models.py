# SPDX-License-Identifier: BSD-3-Clause
"""Plans of models with windows, experts, latents and states, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tree_attention.planning import arithmetic, tables
from tree_attention.planning.arithmetic import (
    DATA,
    PROMPTS,
    RING,
    SPLIT,
    SPLIT_BY_HEADS,
    TENSOR,
    WHOLE,
    Work,
)
from tree_attention.planning.machines import LINKS, MACHINES, Hosts
from tree_attention.planning.models import NAMED, Attention, Model
from tree_attention.planning.plans import MAX_CONTEXT, Plan, verdicts
from tree_attention.planning.reading import NAMES, find_model

H200 = Hosts(MACHINES["h200"], LINKS["nvlink"])
DENSE = NAMED["llama-3.1-8b"]
(FULL,) = DENSE.attention
# Every other layer sees 4,096 tokens.
WINDOWED = replace(
    DENSE,
    attention=(replace(FULL, layers=16), replace(FULL, layers=16, window=4096, margin=128)),
)
EXPERTS = replace(
    DENSE, weights=replace(DENSE.weights, experts=20_000_000_000, num_experts=64, chosen=4)
)
LATENT = replace(
    DENSE,
    attention=(Attention(32, 32, 1, 192, 128, latent=(512, 64)),),
    not_split="latents",
)
STATES = replace(
    DENSE,
    attention=(replace(FULL, layers=8),),
    state_layers=24,
    states_bytes=50_000_000,
    not_dealt="states",
)


def plan_of(model: Model, context: int = 128 << 10, ranks: int = 8, sequences: int = 1) -> Plan:
    return Plan(model, H200, ranks, Work(context, sequences))


def test_windows_stop_growing() -> None:
    whole = 16 * 4096  # bytes of a token in half of the layers
    for context in (1 << 17, 1 << 20):
        row = plan_of(WINDOWED, context).row(WHOLE)
        assert row.cache == whole * (context + 4096 + 128) / 8
        dense = plan_of(DENSE, context).row(WHOLE)
        unread = whole * (context - 4096) / 8
        assert dense.token.local - row.token.local == pytest.approx(unread / 4.8e12)
        assert dense.token.exchange == row.token.exchange  # every layer merges
    narrow = replace(DENSE, attention=WINDOWED.attention[1:])
    assert plan_of(narrow).longest(DATA) == MAX_CONTEXT
    assert plan_of(narrow, 1 << 20).row(WHOLE).token == plan_of(narrow, 1 << 25).row(WHOLE).token


def test_windows_bound_the_pairs_of_a_prompt() -> None:
    (_, narrow) = WINDOWED.attention
    # By hand: 4,096 queries see half of as many, and all others 4,096.
    assert narrow.pairs(10_000) == 4096 * 4096 / 2 + (10_000 - 4096) * 4096
    assert FULL.pairs(10_000) == 10_000**2 / 2
    assert narrow.pairs(1000) == FULL.pairs(1000)


def test_a_token_reads_the_experts_that_it_is_sent_to() -> None:
    def difference(sequences: int, form: str) -> float:
        plans = (plan_of(model, 1, 8, sequences) for model in (EXPERTS, DENSE))
        experts, dense = (plan.row(form).token.local for plan in plans)
        return 4.8e12 * (experts - dense)

    assert difference(1, WHOLE) == pytest.approx(2 * 20e9 * 4 / 64)
    assert difference(1, TENSOR) == pytest.approx(2 * 20e9 * 4 / 64 / 8)
    # Split weights leave the experts whole.
    assert difference(1, SPLIT_BY_HEADS) == pytest.approx(2 * 20e9 * 4 / 64)
    assert difference(8, WHOLE) == pytest.approx(2 * 20e9 * (1 - (60 / 64) ** 8))
    assert difference(8, DATA) == difference(1, DATA)  # a sequence each


def test_memory_has_all_experts_and_a_prompt_some() -> None:
    for form, ranks in ((WHOLE, 1), (SPLIT, 1), (TENSOR, 8)):
        held = [plan_of(model).row(form).weights for model in (EXPERTS, DENSE)]
        assert held[0] - held[1] == pytest.approx(2 * 20e9 / ranks)
    times = [plan_of(model, 4096).row(WHOLE).prefill.local for model in (EXPERTS, DENSE)]
    assert times[0] - times[1] == pytest.approx(2 * 20e9 * 4 / 64 * 4096 / 500e12)
    assert tables.sources(plan_of(EXPERTS))[0] == (
        "Model: 28 billion weights in 56.1 GB, of which a token needs 8.75 billion, with 4 of 64 "
        "experts in a layer."
    )


def test_latents_are_one_head_that_all_queries_attend_to() -> None:
    (layers,) = LATENT.attention
    assert layers.token_bytes("bf16") == 2 * 576 and layers.token_bytes("int8") == 576 + 8
    row = plan_of(LATENT).row(WHOLE)
    assert row.cache == 32 * 1152 * (128 << 10) / 8
    work = Work(128 << 10)
    assert arithmetic.token_bytes(LATENT, WHOLE, 8, work) == 32 * 7 * 4 * 32 * 513
    # Tensor parallel ranks all have the latents, and share the heads.
    tensor = plan_of(LATENT).row(TENSOR)
    assert tensor.cache == 8 * row.cache and tensor.refusal == ""
    assert [plan_of(LATENT).row(form).refusal for form in (SPLIT, SPLIT_BY_HEADS)] == [
        "refused"
    ] * 2
    assert verdicts(plan_of(LATENT))[1:] == ["Refused: latents."]


def test_prompts_make_keys_and_values_from_latents_for_every_chunk() -> None:
    (layers,) = LATENT.attention
    assert layers.expansion == 2 * 32 * 512 * (128 + 128)
    without = replace(LATENT, attention=(replace(layers, latent=None, kv_heads=32),))

    def operations(model: Model, form: str) -> float:
        return 500e12 * plan_of(model, 4096).row(form).prefill.local

    # Two chunks: of 2,048 tokens, and of all.
    expected = 32 * layers.expansion * (2048 + 4096)
    for form, share in ((WHOLE, 1 / 8), (DATA, 1)):
        found = operations(LATENT, form) - operations(without, form)
        assert found == pytest.approx(expected * share)
    found = operations(LATENT, RING) - operations(without, RING)
    assert found == pytest.approx(32 * layers.expansion * 4096)  # every rank of all, once


def test_states_are_on_every_rank() -> None:
    per_token = 8 * 4096 * (128 << 10)
    for form, ranks, copies in ((WHOLE, 8, 1), (DATA, 1, 1), (TENSOR, 8, 1 / 8)):
        row = plan_of(STATES).row(form)
        assert row.cache == pytest.approx(per_token / ranks + copies * 50e6)
    assert [plan_of(STATES).row(form).refusal for form in (PROMPTS, RING)] == ["refused"] * 2
    bare = replace(STATES, states_bytes=0)
    read = [plan_of(model).row(WHOLE).token.local for model in (STATES, bare)]
    assert read[0] - read[1] == pytest.approx(2 * 50e6 / 4.8e12)  # read and written
    assert tables.sources(plan_of(STATES))[1] == (
        "Cache: 32,768 bytes a token in 8 layers; 50 MB for states of any context in 24 layers."
    )


def test_prompts_that_may_not_be_chunked_come_at_once() -> None:
    whole = replace(STATES, may_be_chunked=False)
    rows = [plan_of(model).row(WHOLE) for model in (whole, STATES)]
    assert rows[0].exchange == 64 * rows[1].exchange
    assert rows[0].prefill.exchange < rows[1].prefill.exchange  # fewer rounds


def test_one_rank_is_refused_nothing() -> None:
    assert all(not row.obstacle for row in plan_of(LATENT, ranks=1).rows())


@pytest.mark.deep
@pytest.mark.parametrize("name", NAMES)
def test_a_form_that_is_sooner_stays_sooner(name: str) -> None:
    """The search for a break-even context halves an interval."""
    plan = plan_of(find_model(name))
    for sharded, other in ((WHOLE, DATA), (SPLIT_BY_HEADS, TENSOR)):
        context = plan.break_even(sharded, other)
        for exponent in range(27):
            rows = (plan.at(1 << exponent).row(form) for form in (sharded, other))
            own, others = (row.token.total for row in rows)
            expected = context is not None and 1 << exponent >= context
            # Where equal terms are added in another order.
            if abs(own - others) > 1e-12 * others:
                assert (own < others) == expected, exponent


def test_every_cell_has_something_in_it() -> None:
    for model in (DENSE, LATENT, STATES, replace(LATENT, not_dealt="no")):
        for ranks in (1, 3, 8):
            plan = plan_of(model, ranks=ranks)
            for _, cells in tables.forms(plan):
                assert all(cells)
