# SPDX-License-Identifier: BSD-3-Clause
"""Plans: links that are fitted, forms beside one another and break-even contexts."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tree_attention import shares
from tree_attention.exchange.auto.choose import CostTable, Measured
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
from tree_attention.planning.machines import LINKS, MACHINES, Hosts, Link, fitted_link, link_of
from tree_attention.planning.models import NAMED, llama

MODEL = NAMED["llama-3.1-8b"]
H200 = Hosts(MACHINES["h200"], LINKS["nvlink"])
PLAN = Plan(MODEL, H200, 8, Work(128 << 10))


def table(*seconds: float, ranks: int = 3, strategy: str = "all_gather") -> CostTable:
    """Of states of 1,000, 2,000, ... bytes."""
    rows = (Measured(strategy, 1000 * (i + 1), time) for i, time in enumerate(seconds))
    return CostTable("gloo", tuple(range(ranks)), tuple(rows))


def test_link_is_fitted_to_measured_exchanges() -> None:
    # 1 ms and 2 states of 1 us each for 1,000 bytes.
    link = fitted_link(table(1e-3 + 2e-6, 5e-3, 1e-3 + 6e-6), "costs.json")
    assert link.bandwidth == pytest.approx(1e9) and link.round_seconds == pytest.approx(1e-3)
    assert link.source == "fitted to costs.json, measured over gloo on 3 ranks"


def test_link_of_noisy_times_has_positive_costs() -> None:
    link = fitted_link(table(2e-3, 1e-3), "")
    assert 0 < link.bandwidth < float("inf") and link.round_seconds > 0
    assert fitted_link(table(1e-9, 1.0), "").round_seconds == 0


@pytest.mark.parametrize(
    "costs", [table(1.0), table(1.0, 2.0, ranks=1), table(1.0, 2.0, strategy="butterfly")]
)
def test_table_without_a_line_to_fit_is_refused(costs: CostTable) -> None:
    with pytest.raises(ValueError, match=r"costs\.json must have two ranks and two sizes"):
        fitted_link(costs, "costs.json")


def test_gpus_of_several_nodes_have_a_slower_link() -> None:
    assert [link_of(MACHINES["h200"], ranks) for ranks in (8, 9)] == ["nvlink", "infiniband"]
    assert [link_of(MACHINES["cpu"], ranks) for ranks in (8, 9)] == ["10gbe", "10gbe"]


TINY = llama("tiny", 1, 64, 128, 8, 4, 512, head_dim=16)


def test_ranks_make_a_part_each_of_large_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """They read that much less, gather once more in each layer, and send the others their part."""
    link = Link(bandwidth=math.inf, round_seconds=1.0, source="")
    for form, others in ((SPLIT, 7), (SPLIT_BY_HEADS, 0)):  # T is 8: no rank has the same heads
        split = replace(PLAN, model=NAMED["llama-3.1-70b"]).split(form)
        queries = split.model.weights.queries
        assert queries == 80 * 64 * 128 * 8192
        monkeypatch.setattr(shares, "LEAST_SAVED", math.inf)
        whole = [split.weights_bytes, split.token_bytes]
        whole.append(split.token_seconds(Hosts(H200.machine, link)).exchange)
        monkeypatch.undo()
        assert whole[0] - split.weights_bytes == pytest.approx(2 * queries * others / 8)
        assert split.token_bytes - whole[1] == pytest.approx(2 * others / 8 * 80 * 64 * 128)
        gathered = split.token_seconds(Hosts(H200.machine, link)).exchange
        assert gathered - whole[2] == 80 * (others > 0)
    # Of 8B a rank would save too little.
    assert PLAN.split(SPLIT).weights_bytes == pytest.approx(
        2 * (MODEL.weights.q + MODEL.weights.kv + MODEL.weights.vectors)
        + 2 * (MODEL.weights.split + MODEL.weights.head + MODEL.weights.embedding) / 8
    )


def test_one_rank_sends_nothing_and_all_forms_are_one() -> None:
    splits = [replace(PLAN, ranks=1).split(form) for form in ALL_FORMS]
    times = [(x.token_seconds(H200), x.prefill_seconds(H200)) for x in splits]
    assert len({(x.held_bytes, *each) for x, each in zip(splits, times, strict=True)}) == 1
    assert times[0][0].exchange == times[0][1].exchange == 0


def test_tensor_parallel_copies_what_it_has_no_heads_for() -> None:
    same = [PLAN.split(form) for form in (SPLIT_BY_HEADS, TENSOR)]
    assert same[0].cache_bytes == same[1].cache_bytes
    assert same[0].token_seconds(H200) == same[1].token_seconds(H200)
    tree, tensor = (replace(PLAN, ranks=16).split(form) for form in (SPLIT_BY_HEADS, TENSOR))
    assert tensor.cache_bytes == 2 * tree.cache_bytes == PLAN.split(TENSOR).cache_bytes
    assert replace(PLAN, ranks=12).refusal(TENSOR) == "uneven"


def test_data_parallel_ranks_have_sequences_of_their_own() -> None:
    cache = PLAN.model.layers * MODEL.attention[0].token_bytes("bf16") * PLAN.work.context
    for sequences, own in ((1, 1), (8, 1), (9, 2)):
        plan = replace(PLAN, work=replace(PLAN.work, sequences=sequences))
        data, tree = plan.split(DATA), plan.split(WHOLE)
        assert data.cache_bytes == own * cache and tree.cache_bytes == sequences * cache / 8
        alone = replace(PLAN, ranks=1).split(WHOLE).prefill_seconds(H200).total
        assert data.prefill_seconds(H200).total == own * alone
    # By hand: matrices, norms and lm_head, and all keys and values, at 4.8 TB/s.
    read = 2 * (32 * 218_103_808 + 65 * 4096 + 128256 * 4096) + 131072 * 32 * 4096
    assert PLAN.split(DATA).token_seconds(H200).total == pytest.approx(read / 4.8e12)


def test_many_sequences_take_arithmetic() -> None:
    def local(sequences: int) -> float:
        work = Work(context=1, sequences=sequences)
        return replace(PLAN, work=work).split(WHOLE).token_seconds(H200).local

    assert local(2) == pytest.approx(local(1), rel=1e-5)  # all weights are read once
    assert local(4000) == pytest.approx(2 * local(2000), rel=1e-2)


@pytest.mark.parametrize("form", ALL_FORMS)
def test_longest_context_fits_and_the_next_does_not(form: str) -> None:
    longest = PLAN.longest(form)
    assert 0 < longest < MAX_CONTEXT
    memory = H200.machine.memory
    held = [PLAN.split(form, longest + more).held_bytes for more in (0, 1)]
    assert held[0] <= memory < held[1]
    work = replace(PLAN.work, context=longest + 1)
    assert replace(PLAN, work=work).refusal(form) == "no room"


def test_longest_context_has_bounds() -> None:
    small = replace(PLAN, model=TINY)
    assert small.longest(WHOLE) == MAX_CONTEXT
    assert replace(PLAN, model=NAMED["llama-3.1-405b"]).longest(WHOLE) == 0


def test_break_even_is_the_first_context_that_pays() -> None:
    context = PLAN.break_even(WHOLE, DATA)
    assert context is not None and context > 1

    def gain(context: int) -> float:
        splits = (PLAN.split(form, context) for form in (DATA, WHOLE))
        data, tree = (split.token_seconds(H200).total for split in splits)
        return data - tree

    assert gain(context - 1) <= 0 < gain(context)
    busy = replace(PLAN, work=replace(PLAN.work, sequences=8))
    assert busy.break_even(WHOLE, DATA) is None


def test_verdicts() -> None:
    eight = PLAN.verdicts()
    assert f"from {PLAN.break_even(WHOLE, DATA):,} tokens on; the whole model and" in eight[0]
    # 8 ranks split the 8 heads: the largest T is tensor parallel.
    assert "never makes a token faster than tensor parallel" in eight[1]
    sixteen = replace(PLAN, ranks=16)
    assert f"from {sixteen.break_even(SPLIT_BY_HEADS, TENSOR):,}" in sixteen.verdicts()[1]
    # Ranks that split heads have copies of latents, so that only T = 1 splits their cache.
    latents = Plan(NAMED["glm-4.7-flash"], Hosts(MACHINES["cpu"], LINKS["10gbe"]), 4, PLAN.work)
    assert latents.break_even(SPLIT_BY_HEADS, TENSOR) is None
    assert f"from {latents.break_even(SPLIT, TENSOR):,} tokens on" in latents.verdicts()[1]
    busy = replace(PLAN, work=replace(PLAN.work, sequences=8))
    assert "never makes a token faster than data parallel" in busy.verdicts()[0]
    large = replace(
        PLAN, model=NAMED["llama-3.1-70b"], hosts=replace(H200, machine=MACHINES["h100"])
    )
    assert large.verdicts()[0] == "Without split weights: the model does not fit on a rank."
    assert len(replace(PLAN, ranks=12).verdicts()) == 1
    assert replace(PLAN, ranks=1).verdicts() == ["With one rank there is nothing to split."]


def test_best_form_is_the_soonest_that_fits() -> None:
    able = [PLAN.split(form) for form in ALL_FORMS if not PLAN.refusal(form)]
    soonest = min(able, key=lambda split: split.token_seconds(H200).total)
    assert PLAN.best() == soonest.form == SPLIT_BY_HEADS
    # Of two with the same token the one with the sooner prompt.
    hosts, work = Hosts(H200.machine, LINKS["1gbe"]), replace(PLAN.work, context=1 << 24)
    assert Plan(NAMED["llama-3.2-1b"], hosts, 8, work).best() == PROMPTS
    assert replace(PLAN, model=NAMED["llama-3.1-405b"], ranks=2).best() is None


@pytest.mark.parametrize("sequences, phases", [(4, 1), (8, 2)])
def test_rounds_of_sums_that_have_two_phases(sequences: int, phases: int) -> None:
    """A sum of 70B's hidden states is 64 KiB of 4 sequences, more than which takes two phases."""
    hosts = Hosts(MACHINES["h100"], Link(math.inf, 1.0, ""))
    split = Split(NAMED["llama-3.1-70b"], SPLIT, 2, Work(0, sequences=sequences))
    # Queries of each of 80 layers, their states, sums, and logits.
    assert split.token_seconds(hosts).exchange == 80 + 80 + phases * 161 + 1


FAR = Plan(MODEL.with_far_keys(16 << 10), H200, 1, Work(272 << 10))


def test_a_token_with_far_keys_takes_the_longer_part() -> None:
    """By hand: 32 layers of 4,096 bytes a token, near ones at 4.8 TB/s, far ones at 307 GB/s."""
    split, without = FAR.split(WHOLE), FAR.split(DATA)
    near, far = (tokens * 32 * 4096 for tokens in (16 << 10, 256 << 10))
    assert (split.cache_bytes, split.host_bytes) == (near, far)
    assert (without.cache_bytes, without.host_bytes) == (near + far, 0)
    step = split.far_step(H200.machine)
    sent = 32 * (32 * 128 * 2 + 32 * 129 * 4)
    assert step.bus_bytes == sent <= far / 1000
    assert step.near == pytest.approx(near / 4.8e12) and step.far == pytest.approx(far / 307e9)
    assert step.bus == pytest.approx(32 * 20e-6 + sent / 48e9)
    assert step.merge == pytest.approx(3 * 32 * 32 * 129 * 4 / 4.8e12)
    weights = without.token_seconds(H200).total - (near + far) / 4.8e12
    total = weights + step.far + step.bus + step.merge
    assert split.token_seconds(H200).total == pytest.approx(total)
    # Where the GPU has the longer part, it waits for nothing.
    most = replace(FAR, model=MODEL.with_far_keys(270 << 10)).split(WHOLE)
    step = most.far_step(H200.machine)
    assert 0 < step.far + step.bus < step.near and step.waiting == 0
    total = weights + most.cache_bytes / 4.8e12 + step.merge
    assert most.token_seconds(H200).total == pytest.approx(total)


def test_far_keys_of_several_ranks_and_sequences() -> None:
    plan = replace(FAR, ranks=4, work=replace(FAR.work, sequences=3))
    for form in (WHOLE, SPLIT, SPLIT_BY_HEADS):
        split = plan.split(form)
        assert split.host_bytes == 3 * FAR.split(WHOLE).host_bytes / 4
        heads = 32 // split.tensor_parallel_size
        sent = 3 * 32 * (heads * 128 * 2 + heads * 129 * 4)
        assert split.far_step(H200.machine).bus_bytes == sent
    assert plan.split(TENSOR).host_bytes == plan.split(DATA).host_bytes == 0
    assert plan.refusal(PROMPTS) == "refused"
    assert plan.verdicts()[0] == "Refused: with far keys every rank reads the whole prompt."


def test_layers_with_a_window_have_no_far_keys() -> None:
    (layers,) = MODEL.attention
    windows = replace(layers, layers=16, window=1024), replace(layers, layers=16)
    split = replace(FAR, model=replace(FAR.model, attention=windows)).split(WHOLE)
    assert split.host_bytes == 16 * 4096 * (256 << 10)
    assert split.cache_bytes == 16 * 4096 * (1024 + (16 << 10))
    assert split.far_step(H200.machine).near == pytest.approx(16 * 4096 * (16 << 10) / 4.8e12)


def test_far_keys_come_to_the_gpu_for_each_chunk_of_a_prompt() -> None:
    split, without = FAR.split(WHOLE), FAR.split(DATA)
    read = sum(range(0, 256 << 10, 2048)) * 32 * 4096
    seconds = split.prefill_seconds(H200).total - without.prefill_seconds(H200).total
    assert seconds == pytest.approx(read / 48e9)


def test_far_keys_need_room_on_both() -> None:
    longest = FAR.longest(WHOLE)
    for more, fits in ((0, True), (1, False)):
        split = FAR.split(WHOLE, longest + more)
        assert (split.host_bytes <= 512e9) == fits and split.held_bytes < H200.machine.memory
    assert replace(FAR, work=Work(longest + 1)).refusal(WHOLE) == "no room"
    near = replace(FAR, model=MODEL.with_far_keys(1 << 20), work=Work(1 << 20))
    assert near.split(WHOLE).host_bytes == 0 and near.refusal(WHOLE) == "no room"
    assert near.verdicts() == [
        "No form of this library has room for weights and near keys on the GPUs and for far keys "
        "on their hosts."
    ]
    short = replace(FAR, work=Work(16 << 10))
    assert short.verdicts() == ["No key is far: the context is not longer than the near tokens."]
    assert short.split(WHOLE).token_seconds(H200) == short.split(DATA).token_seconds(H200)
