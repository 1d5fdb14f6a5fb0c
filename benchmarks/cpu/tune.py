# SPDX-License-Identifier: BSD-3-Clause
"""The sweep of `benchmarks.tune` on the CPU."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tree_attention.reference.accuracy import Float64Check

from ..harness.measure import InputArena, Samples, pin_threads, read_memory, time_alternating
from ..harness.tuning import Call, Problem, Variant
from . import tiles
from .cases import DecodeCase, Inputs, kv_set_bytes, visible
from .decode import MIN_PROBE_BYTES, PROBE

WORKERS = (0, 1, 4, 8, 16)  # of each thread; lean_decode chooses one to eight


class CpuSweep:
    name, title = "tune", "Tiles and workers of lean_decode on the CPU"

    def __init__(self, cases: Sequence[DecodeCase]) -> None:
        tiles.load()
        self._cpus = pin_threads()
        set_bytes = [kv_set_bytes(case) for case in cases]
        self._arena = InputArena(max(n * InputArena.num_sets(n) for n in set_bytes))

    def environment(self) -> dict[str, Any]:
        return {"pinned to CPUs": self._cpus or "not pinned"}

    def own(self, head_dim: int) -> Variant:
        return Variant(tiles.OWN)

    def variants(self, head_dim: int) -> list[Variant]:
        workers = [n * torch.get_num_threads() for n in WORKERS]
        return [Variant(tile, number) for tile in tiles.TILES for number in workers]

    def problem(self, case: DecodeCase) -> Problem:
        inputs = Inputs(case, self._arena)
        q, sets, ranges, table = inputs.q, inputs.sets, inputs.key_ranges, inputs.page_table
        read = [visible(case, *tensors) for tensors in sets]

        def call(variant: Variant, i: int) -> tuple[Tensor, Tensor]:
            op = tiles.operator(variant.tile)
            return op(q, *sets[i], ranges, page_table=table, num_workers=variant.workers)

        def time(
            calls: Mapping[str, Call], seconds: float
        ) -> tuple[Mapping[str, Samples], Mapping[str, str]]:
            return time_alternating(calls, num_sets=inputs.num_sets, seconds=seconds), {}

        return Problem(
            call=call,
            probes={PROBE: lambda i: read_memory(*read[i])}
            if kv_set_bytes(case) >= MIN_PROBE_BYTES
            else {},
            probe_bytes=sum(x.nbytes for x in read[0]),
            time=time,
            accuracy=Float64Check(q, *sets[0], ranges, page_table=table).accuracy,
        )
