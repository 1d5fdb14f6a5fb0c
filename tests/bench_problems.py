# SPDX-License-Identifier: BSD-3-Clause
"""Small cases of the CUDA benchmark, of every kind, with their tensors."""

import torch

from benchmarks.cuda.cases import Case
from benchmarks.cuda.inputs import Inputs
from benchmarks.harness.measure import Arena

SMALL = [
    Case(heads=(4, 2), head_dim=64, lengths=(70,)),
    Case(heads=(4, 2), head_dim=64, lengths=(70, 70), seqlen_q=5),
    Case(heads=(4, 1), head_dim=64, lengths=(3, 40, 70), layout="NHD"),
    Case(heads=(2, 2), head_dim=64, lengths=(20, 20), capacity=90, layout="NHD"),
    Case(heads=(4, 2), head_dim=64, lengths=(9, 9, 60), layout="packed"),
    Case(heads=(4, 2), head_dim=64, lengths=(70, 50), window=20),
    Case(heads=(4, 2), head_dim=64, lengths=(70, 50), window=20, seqlen_q=3),
    Case(heads=(4, 2), head_dim=64, lengths=(70, 50), page_size=16),
    Case(heads=(4, 2), head_dim=64, lengths=(33, 17), page_size=1, capacity=40),
]


def make_inputs(case: Case, sets: int = 2, device: torch.device | str = "cpu") -> Inputs:
    return Inputs(case, Arena(sets * case.set_bytes, device), sets)
