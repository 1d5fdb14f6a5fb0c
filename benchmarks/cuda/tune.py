# SPDX-License-Identifier: BSD-3-Clause
"""The sweep of `benchmarks.tune` on a GPU, with the tiles that
`python -m benchmarks.cuda.ablations` builds."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tree_attention.reference.accuracy import Float64Check

from ..harness.measure import InputArena, Samples
from ..harness.tuning import Call, Problem, Variant
from . import ablations, machine, read_probe, timing
from .cases import CudaCase
from .inputs import Inputs, num_sets

WORKERS = (0.25, 0.5, 1, 2, 4)  # blocks of each multiprocessor; two are resident


class CudaSweep:
    name, title = "tune_cuda", "Tiles, stages and workers of lean_decode on a GPU"

    def __init__(self, cases: Sequence[CudaCase]) -> None:
        self._device = torch.cuda.get_device_properties(0)
        self._sets = {case: num_sets(case.read_bytes, self._device.L2_cache_size) for case in cases}
        self._arena = InputArena(max(n * case.set_bytes for case, n in self._sets.items()), "cuda")

    def environment(self) -> dict[str, Any]:
        return machine.environment()

    def own(self, head_dim: int) -> Variant:
        """16 KB of keys of 16 bits, in as many stages as two blocks have room for (plan.cu)."""
        stages = 3 if self._device.shared_memory_per_multiprocessor >= 228 << 10 else 2
        return Variant(8192 // head_dim, stages=stages)

    def variants(self, head_dim: int) -> list[Variant]:
        workers = [int(n * self._device.multi_processor_count) for n in WORKERS]
        tiles = [Variant(keys, stages=stages) for keys, stages in ablations.TILES]
        return [*tiles, *(Variant(workers=n) for n in workers)]

    def problem(self, case: CudaCase) -> Problem:
        inputs = Inputs(case, self._arena, self._sets[case])
        q, sets, ranges = inputs.q, inputs.sets, None if inputs.all_keys else inputs.key_ranges

        def call(variant: Variant, i: int) -> tuple[Tensor, Tensor]:
            op, kv, options = (
                ablations.operator(variant.tile, variant.stages),
                sets[i],
                inputs.options(i),
            )
            return op(q, kv.k, kv.v, ranges, num_workers=variant.workers, **options)

        def time(
            calls: Mapping[str, Call], seconds: float
        ) -> tuple[Mapping[str, Samples], Mapping[str, str]]:
            found = timing.measure(calls, len(sets), seconds / len(calls))
            return {name: x.graph for name, x in found.measured.items()}, found.failed

        candidates = read_probe.candidates([kv.span[: case.read_bytes] for kv in sets])
        return Problem(
            call=call,
            probes={f"read probe {shape}": call for shape, call in candidates.items()},
            probe_bytes=case.read_bytes,
            time=time,
            accuracy=Float64Check(q, sets[0].k, sets[0].v, ranges, **inputs.options(0)).accuracy,
        )
