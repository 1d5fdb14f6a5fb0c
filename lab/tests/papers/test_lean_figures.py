# SPDX-License-Identifier: BSD-3-Clause
"""Schedules of one GPU: every tile once, and what a pencil finds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.simulation.schedule import (
    ASSUMED,
    BEST_SPLIT,
    FLASH_ATTENTION_2,
    FLASH_DECODING,
    FLASH_INFER,
    LEAN,
    TILES,
    Costs,
    Gpu,
    Work,
    fixed_split,
    flash_decoding,
    gpu_of,
    makespan,
    ratios_to_lean,
    schedules,
    stream_k,
    uniform,
)

A100 = gpu_of("A100")
FIVE = Gpu("five", 5, 5e6, resident=1)


def tiles_until_the_end(blocks: np.ndarray, gpu: Gpu) -> float:
    return makespan(blocks.astype(float), gpu.multiprocessors)


def test_blocks_start_where_there_is_least_to_do() -> None:
    assert makespan(np.array([4.0, 1.0, 2.0, 2.0]), 2) == 5.0
    assert makespan(np.full(7, 2.0), 3) == 6.0


def test_stream_k_is_figure_6() -> None:
    """Ranges of LeanAttention's own example, in which the third SM works on both heads."""
    plan = stream_k(uniform(5 * 256, 2), 5)
    assert plan.blocks.tolist() == [2] * 5 and plan.outputs.tolist() == [1, 1, 2, 1, 1]
    assert plan.parts == 3


def test_costs_add_up() -> None:
    costs = Costs(launch=1.0, output=0.25, merge=0.5, lone=0.5)
    work = uniform(4 * 256, 2)
    # An SM reads 1e6 bytes per second and, with one block, half of that.
    tile = work.tile_bytes / 1e6
    assert work.tile_bytes == 2 * 256 * 64 * 2
    one, three = fixed_split(work, 1), fixed_split(work, 3)
    assert one.seconds(work, FIVE, costs) == pytest.approx(1.0 + 0.25 + 2 * 4 * tile)
    assert three.blocks.tolist() == [2, 2, 0, 2, 2, 0]
    merged = 0.25 + 2 * 0.5
    assert three.seconds(work, FIVE, costs) == pytest.approx(2.0 + 0.25 + 2 * 2 * tile + merged)
    assert one.seconds(work, FIVE, TILES) == pytest.approx(4 * tile)


@pytest.mark.parametrize(
    ("heads", "batch", "parts"),
    # The example of FlashAttention's source: 48 outputs on 108 SMs. The paper: 192 heads and B=4 on
    # 8 GPUs are not split, 128 are. From 80 % of the SMs on there is one part.
    [(48, 1, 2), (24, 4, 1), (16, 4, 3), (86, 1, 5), (87, 1, 1), (108, 1, 1)],
)
def test_flash_decoding_takes_its_number_of_parts(heads: int, batch: int, parts: int) -> None:
    work = uniform(256 << 10, heads, batch)
    assert flash_decoding(work, work, A100, TILES).parts == parts


def test_flash_infer_fills_what_fits() -> None:
    work = Work((100 * 256, 1, 10 * 256), 1)
    plan = schedules(work, replace(FIVE, resident=2))[FLASH_INFER]
    # Ten blocks fit: the shortest length of at most ten parts is 13 tiles, of 8 + 1 + 1.
    assert plan.blocks.tolist() == [13] * 7 + [9, 1, 10] and plan.parts == 8
    crowded = uniform(2560, 11)
    assert schedules(crowded, replace(FIVE, resident=2))[FLASH_INFER].parts == 1


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(1, 6000), min_size=1, max_size=6).map(tuple),
    st.integers(1, 5),
    st.sampled_from([64, 128]),
    st.integers(1, 12),
    st.integers(1, 2),
)
def test_every_schedule_reads_every_tile_once(
    keys: tuple[int, ...], heads: int, head_dim: int, multiprocessors: int, resident: int
) -> None:
    work = Work(keys, heads, head_dim)
    gpu = Gpu("any", multiprocessors, 1e12, resident)
    least = -(-int(work.tiles.sum()) // multiprocessors)
    plans = schedules(work, gpu)
    for plan in plans.values():
        assert plan.blocks.sum() == work.tiles.sum() and len(plan.outputs) == len(plan.blocks)
        assert tiles_until_the_end(plan.blocks, gpu) >= least
        assert 0 < plan.occupancy(gpu) <= 1
    # No other is better than equal runs.
    assert tiles_until_the_end(plans[LEAN].blocks, gpu) == least
    assert min(ratios_to_lean(work, gpu, TILES).values()) == pytest.approx(1.0)
    assert plans[FLASH_ATTENTION_2].parts == 1


def test_lengths_unknown_at_launch_cost_fixed_parts_alone() -> None:
    room, work = uniform(128 << 10, 8, 4, head_dim=128), uniform(2 << 10, 8, 4, head_dim=128)
    gpu = gpu_of("H200")
    known, unknown = schedules(work, gpu), schedules(work, gpu, known=room)
    assert known[FLASH_INFER].parts > unknown[FLASH_INFER].parts == 1
    for name in (LEAN, FLASH_ATTENTION_2):
        assert (known[name].blocks == unknown[name].blocks).all()


def test_papers_arithmetic() -> None:
    """FlashAttention-2 over LeanAttention by tiles, and the best number of parts beside it."""
    cases = {
        (512, 56, 1, 1): 1.93,
        (512, 16, 1, 1): 6.74,
        (256, 64, 4, 8): 3.37,
        (64, 64, 1, 1): 1.68,
        (512, 24, 1, 1): 4.49,
        (114, 32, 1, 1): 3.35,
        (512, 192, 4, 8): 1.12,
        (256, 128, 1, 8): 6.74,
    }
    for (context, heads, batch, gpus), expected in cases.items():
        ratios = ratios_to_lean(uniform(context << 10, heads, batch, gpus), A100, TILES)
        assert ratios[FLASH_ATTENTION_2] == pytest.approx(expected, abs=0.005)
        assert 1 - 1e-9 <= ratios[BEST_SPLIT] <= 1.002
        assert ratios[FLASH_DECODING] > 1.1


def test_ragged_batches_are_where_lean_wins() -> None:
    lengths = (128 << 10, *[2 << 10] * 15)
    ratios = ratios_to_lean(Work(lengths, 8, 128), gpu_of("H200"), ASSUMED)
    assert ratios[FLASH_DECODING] > 3 and ratios[BEST_SPLIT] < 1.1


def test_heads_are_dealt_equally() -> None:
    with pytest.raises(ValueError, match="9 heads cannot be dealt equally to 2 GPUs"):
        uniform(1, 9, gpus=2)
