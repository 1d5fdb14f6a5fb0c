# SPDX-License-Identifier: BSD-3-Clause
"""Plans of models with windows, experts, latents and states, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tree_attention.cli.plan import cells, sources
from tree_attention.planning.arithmetic import (
    ALL_FORMS,
    DATA,
    MAX_CONTEXT,
    PROMPTS,
    SPLIT,
    SPLIT_BY_HEADS,
    TENSOR,
    WHOLE,
    Plan,
    Split,
    Work,
)
from tree_attention.planning.machines import LINKS, MACHINES, SUSTAINED, Hosts
from tree_attention.planning.models import NAMED, Attention, Index, Model

H200 = Hosts(MACHINES["h200"], LINKS["nvlink"])
OPERATIONS = SUSTAINED * H200.machine.arithmetic  # in a second
DENSE = NAMED["llama-3.1-8b"]
(FULL,) = DENSE.attention
# Every other layer sees 4,096 tokens.
WINDOWED = replace(
    DENSE, attention=(replace(FULL, layers=16), replace(FULL, layers=16, window=4096))
)
EXPERTS = replace(
    DENSE, weights=replace(DENSE.weights, experts=20_000_000_000, num_experts=64, chosen=4)
)
LATENT = replace(
    DENSE,
    attention=(Attention(32, 32, 1, 192, 128, latent=(512, 64)),),
)
STATES = replace(
    DENSE,
    attention=(replace(FULL, layers=8),),
    states_bytes=50_000_000,
    prompts_not_split="states",
)


def plan_of(model: Model, context: int = 128 << 10, ranks: int = 8, sequences: int = 1) -> Plan:
    return Plan(model, H200, ranks, Work(context, sequences))


def split_of(model: Model, form: str, *plan: int) -> Split:
    return plan_of(model, *plan).split(form)


def token_local(model: Model, form: str, *plan: int) -> float:
    return split_of(model, form, *plan).token_seconds(H200).local


def prefill_local(model: Model, form: str, *plan: int) -> float:
    return split_of(model, form, *plan).prefill_seconds(H200).local


def test_windows_stop_growing() -> None:
    whole = 16 * 4096  # bytes of a token in half of the layers
    for context in (1 << 17, 1 << 20):
        split, dense = (split_of(model, WHOLE, context) for model in (WINDOWED, DENSE))
        assert split.cache_bytes == whole * (context + 4096) / 8
        unread = whole * (context - 4096) / 8
        saved = dense.token_seconds(H200).local - split.token_seconds(H200).local
        assert saved == pytest.approx(unread / 4.8e12)
        assert split.token_bytes == dense.token_bytes  # every layer merges
    narrow = replace(DENSE, attention=WINDOWED.attention[1:])
    assert plan_of(narrow).longest(DATA) == MAX_CONTEXT
    assert token_local(narrow, WHOLE, 1 << 20) == token_local(narrow, WHOLE, 1 << 25)


def test_windows_bound_the_pairs_of_a_prompt() -> None:
    (_, narrow) = WINDOWED.attention
    # By hand: 4,096 queries see half of as many, and all others 4,096.
    assert narrow.pairs(10_000) == 4096 * 4096 / 2 + (10_000 - 4096) * 4096
    assert FULL.pairs(10_000) == 10_000**2 / 2
    assert narrow.pairs(1000) == FULL.pairs(1000)


def test_a_token_reads_the_experts_that_it_is_sent_to() -> None:
    def difference(sequences: int, form: str) -> float:
        experts, dense = (token_local(model, form, 1, 8, sequences) for model in (EXPERTS, DENSE))
        return 4.8e12 * (experts - dense)

    assert difference(1, WHOLE) == pytest.approx(2 * 20e9 * 4 / 64)
    assert difference(1, TENSOR) == pytest.approx(2 * 20e9 * 4 / 64 / 8)
    # Every rank reads its slice of each expert.
    assert difference(1, SPLIT_BY_HEADS) == pytest.approx(2 * 20e9 * 4 / 64 / 8)
    assert difference(8, WHOLE) == pytest.approx(2 * 20e9 * (1 - (60 / 64) ** 8))
    assert difference(8, DATA) == difference(1, DATA)  # a sequence each


def test_memory_has_all_experts_and_a_prompt_some() -> None:
    for form, ranks in ((WHOLE, 1), (SPLIT, 8), (TENSOR, 8)):
        held = [split_of(model, form).weights_bytes for model in (EXPERTS, DENSE)]
        assert held[0] - held[1] == pytest.approx(2 * 20e9 / ranks)
    times = [prefill_local(model, WHOLE, 4096) for model in (EXPERTS, DENSE)]
    assert times[0] - times[1] == pytest.approx(2 * 20e9 * 4 / 64 * 4096 / OPERATIONS)
    assert sources(plan_of(EXPERTS))[1] == (
        "Model: 28 billion weights in 56.1 GB, 4 of 64 experts for a token."
    )


def test_latents_are_one_head_that_all_queries_attend_to() -> None:
    (layers,) = LATENT.attention
    assert layers.token_bytes("bf16") == 2 * 576 and layers.token_bytes("int8") == 576 + 8
    split, tensor = split_of(LATENT, WHOLE), split_of(LATENT, TENSOR)
    assert split.cache_bytes == 32 * 1152 * (128 << 10) / 8
    assert split.token_bytes == 32 * 7 * 4 * 32 * 513
    # Tensor parallel ranks all have the latents, and share the heads.
    assert tensor.cache_bytes == 8 * split.cache_bytes and tensor.obstacle == ""
    # Of split weights T divides the query heads, and the T ranks of a tensor group have the same.
    for form, size in ((SPLIT, 1), (SPLIT_BY_HEADS, 8)):
        weights = split_of(LATENT, form)
        assert weights.tensor_parallel_size == size and weights.obstacle == ""
        assert weights.cache_bytes == size * split.cache_bytes
    assert not any("Refused" in sentence for sentence in plan_of(LATENT).verdicts())


def test_prompts_make_keys_and_values_from_latents_for_every_chunk() -> None:
    (layers,) = LATENT.attention
    assert layers.expansion == 2 * 32 * 512 * (128 + 128)
    without = replace(LATENT, attention=(replace(layers, latent=None, kv_heads=32),))
    # Two chunks: of 2,048 tokens, and of all.
    expected = 32 * layers.expansion * (2048 + 4096)
    for form, share in ((WHOLE, 1 / 8), (DATA, 1)):
        more = prefill_local(LATENT, form, 4096) - prefill_local(without, form, 4096)
        assert OPERATIONS * more == pytest.approx(expected * share)


def test_states_are_on_every_rank() -> None:
    per_token = 8 * 4096 * (128 << 10)
    for form, ranks, copies in ((WHOLE, 8, 1), (DATA, 1, 1), (TENSOR, 8, 1 / 8)):
        found = split_of(STATES, form).cache_bytes
        assert found == pytest.approx(per_token / ranks + copies * 50e6)
    assert plan_of(STATES).refusal(PROMPTS) == "refused"
    bare = replace(STATES, states_bytes=0)
    read = token_local(STATES, WHOLE) - token_local(bare, WHOLE)
    assert read == pytest.approx(2 * 50e6 / 4.8e12)  # read and written
    assert sources(plan_of(STATES))[2] == (
        "Cache: 32,768 bytes a token in 8 layers; 50 MB for states of any context."
    )


def test_one_rank_is_refused_nothing() -> None:
    plan = plan_of(LATENT, ranks=1)
    assert not any(plan.split(form).obstacle for form in ALL_FORMS)


@pytest.mark.deep
@pytest.mark.parametrize("model", [*NAMED.values(), EXPERTS, WINDOWED, LATENT, STATES])
def test_a_form_that_is_sooner_stays_sooner(model: Model) -> None:
    """The search for a break-even context halves an interval."""
    plan = plan_of(model)
    for sharded, other in ((WHOLE, DATA), (SPLIT_BY_HEADS, TENSOR)):
        context = plan.break_even(sharded, other)
        for exponent in range(27):
            splits = (plan.split(form, 1 << exponent) for form in (sharded, other))
            own, others = (split.token_seconds(H200).total for split in splits)
            expected = context is not None and 1 << exponent >= context
            # Where equal terms are added in another order.
            if abs(own - others) > 1e-12 * others:
                assert (own < others) == expected, exponent


def test_every_cell_has_something_in_it() -> None:
    for model in (DENSE, LATENT, STATES, replace(LATENT, prompts_not_split="no")):
        for ranks in (1, 3, 8):
            plan = plan_of(model, ranks=ranks)
            for form in ALL_FORMS:
                assert len(cells(plan, form)) == 8 and all(cells(plan, form))


def test_an_index_that_chooses_keys() -> None:
    """The sizes of DeepSeek-V3.2: a token reads all index keys, and 2,048 of the rows."""
    (dense,) = LATENT.attention
    chosen = replace(dense, index=Index(2048, 64, 128, 2048))
    shared = replace(dense, index=Index(2048))
    assert chosen.token_bytes("bf16") == 1408 and shared.token_bytes("bf16") == 1152
    assert chosen.token_bytes("int8") == dense.token_bytes("int8") + 256
    context, ranks = 128 << 10, 8
    assert chosen.attended(context) == 2048 and chosen.attended(100) == 100
    model = replace(LATENT, attention=(chosen,))
    plain, own = (split_of(x, WHOLE, context, ranks) for x in (LATENT, model))
    # 8 bytes for each chosen key of each layer go to each of the other ranks.
    assert own.token_bytes - plain.token_bytes == 7 * 32 * 2048 * 8
    rows, read = 32 * 1152 * 2048 / ranks, 32 * 256 * context / ranks
    assert own._kept_bytes(chosen, 2048) == rows + read
    assert own.cache_bytes - plain.cache_bytes == read
    assert token_local(model, WHOLE, context, ranks) < token_local(LATENT, WHOLE, context, ranks)
    # While all keys are chosen the index costs memory alone.
    short = (split_of(x, WHOLE, 2048, ranks) for x in (LATENT, model))
    assert len({x.token_bytes for x in short}) == 1
    # Of a split prompt a rank gets the rows of all slots, and sends its own once a chunk. While all
    # keys are chosen, queries and states may travel, as those of other models do.
    dealt = [split_of(x, PROMPTS, context, ranks) for x in (LATENT, model)]
    assert dealt[1]._chunk_bytes(chosen, context - 1024, 1024) == context * 1408 * 7 / 8
    assert dealt[1]._chunk_bytes(chosen, 2047, 1) == dealt[0]._chunk_bytes(dense, 2047, 1)
    seconds = (x.prefill_seconds(H200).exchange for x in (dealt[1], own))
    assert next(seconds) < next(seconds)
    # 2 * 64 * 128 operations for each of half of all pairs, and of absorbed attention.
    pairs = 2048 * context - 2048 * 2048 / 2
    flop = 2 * 64 * 128 * context * context / 2 + 2 * 32 * (576 + 512) * pairs
    none = replace(model, attention=(replace(chosen, layers=0),))
    seconds = (split_of(x, WHOLE, context, 1).prefill_seconds(H200).local for x in (model, none))
    assert abs(next(seconds) - next(seconds) - 32 * flop / OPERATIONS) < 1e-9 * flop
