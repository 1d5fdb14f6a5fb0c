# SPDX-License-Identifier: BSD-3-Clause
"""Small cases of the CUDA benchmark, of every kind, with their tensors, and a clock for them."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from benchmarks.cuda.cases import CudaCase
from benchmarks.cuda.inputs import Inputs
from benchmarks.harness import measure
from benchmarks.harness.measure import InputArena

SMALL = [
    CudaCase(heads=(4, 2), head_dim=64, lengths=(70,)),
    CudaCase(heads=(4, 2), head_dim=64, lengths=(70, 70), seqlen_q=5),
    CudaCase(heads=(4, 1), head_dim=64, lengths=(3, 40, 70), layout="NHD"),
    CudaCase(heads=(2, 2), head_dim=64, lengths=(20, 20), capacity=90, layout="NHD"),
    CudaCase(heads=(4, 2), head_dim=64, lengths=(9, 9, 60), layout="packed"),
    CudaCase(heads=(4, 2), head_dim=64, lengths=(70, 50), window=20),
    CudaCase(heads=(4, 2), head_dim=64, lengths=(70, 50), window=20, seqlen_q=3),
    CudaCase(heads=(4, 2), head_dim=64, lengths=(70, 50), page_size=16),
    CudaCase(heads=(4, 2), head_dim=64, lengths=(33, 17), page_size=1, capacity=40),
    CudaCase(kv_dtype="int8", heads=(4, 2), head_dim=64, lengths=(70,)),
    CudaCase(kv_dtype="fp8", heads=(4, 2), head_dim=64, lengths=(9, 9, 60), layout="packed"),
    CudaCase(kv_dtype="int8", heads=(4, 2), head_dim=64, lengths=(70, 50), page_size=16),
    CudaCase(kv_dtype="fp8", heads=(4, 2), head_dim=64, lengths=(20, 40), layout="NHD"),
    CudaCase(heads=(4, 1), head_dim=72, latent_dim=64, lengths=(70, 50)),
]


def make_inputs(case: CudaCase, sets: int = 2, device: torch.device | str = "cpu") -> Inputs:
    return Inputs(case, InputArena(sets * case.set_bytes, device), sets)


def measure_on_cpu(calls: Mapping[str, Callable[[int], Any]], num_sets: int, seconds: float) -> Any:
    """`timing.measure` with the CPU's clock."""
    from benchmarks.cuda import timing

    result = timing.Measurement()
    for name, call in calls.items():
        try:
            samples = measure.time_alternating({name: call}, num_sets=num_sets)[name]
        except Exception as error:
            result.failed[name] = timing.reason(error)
            continue
        value = samples.result if isinstance(samples.result, tuple) else (samples.result,)
        samples = measure.Samples(samples.seconds, value)
        result.measured[name] = timing.Measured(samples, samples)
    return result
