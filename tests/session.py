# SPDX-License-Identifier: BSD-3-Clause
"""What every session of pytest begins with, of the library's tests and of the lab's."""

import os

# Threads sleep at a barrier instead of spinning: several times faster where ranks, or other work,
# share the cores. Read once, when torch loads; spawned ranks inherit it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Asking for devices must not initialise CUDA: no process forked after that could use it.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
# torchao, which transformers imports where it is installed, has torch warn of torchao's own calls,
# also in programs of which tests read the standard error.
os.environ.setdefault("TORCH_LOGS", "-torch.utils._pytree")

# Inductor's pool of processes imports torch in each process that compiles, and serves only Triton.
os.environ.setdefault("TORCH_WARM_POOL", "0")

import pytest
import torch
from hypothesis import settings

from distributed import share_servers

# The same examples in every run and no deadline: a busy machine fails no test.
settings.register_profile("repeatable", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _share_servers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if hasattr(request.config, "workerinput"):  # of pytest-xdist
        share_servers(tmp_path_factory.getbasetemp().parent)
