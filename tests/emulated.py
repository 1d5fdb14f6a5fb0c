# SPDX-License-Identifier: BSD-3-Clause
"""The CUDA kernels on the emulated device, in the place of the CPU's operators."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from pathlib import Path

import torch

import emulator_build
import tree_attention.ops  # noqa: F401  registers the operators, before those in their place
from compilation import Compiler

TORCH = Path(torch.__file__).parent
COMPILER = Compiler(
    emulator_build.BUILD / f"torch-{torch.__version__}",
    [*emulator_build.FLAGS, f"-isystem{TORCH}/include"],
    header=Path("tests/cuda_emulator/torch_headers.h"),
)
LIBRARIES = [f"-L{TORCH}/lib", "-ltorch_cpu", "-lc10"]
KERNELS = [
    *emulator_build.EMULATOR,
    *emulator_build.LAUNCHES,
    *emulator_build.INSTANCES,
    *emulator_build.WGMMA_INSTANCES,
]
BRIDGE = [
    Path("tests/cuda_emulator/extension.cpp"),
    *(
        Path("csrc") / name
        for name in (
            "cuda/checks.cpp",
            "cuda/one_shot/one_shot_args.cpp",
            "args/append.cpp",
            "args/cascade.cpp",
            "args/memory_overlap.cpp",
            "args/decode.cpp",
            "args/merge.cpp",
            "args/ranges.cpp",
        )
    ),
]


@dataclass(frozen=True)
class Limits:
    """Limits of a device: multiprocessors, bytes of shared memory of each and of a block
    (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"), whether blocks
    form clusters, and whether calls may take the kernel by wgmma."""

    num_sms: int
    shared_bytes_per_sm: int
    shared_bytes_per_block: int
    has_clusters: bool = False
    has_wgmma: bool = False


A100 = Limits(108, 164 << 10, 163 << 10)
H100 = Limits(132, 228 << 10, 227 << 10, has_clusters=True)


@dataclass(frozen=True)
class TensorCore:
    """How tensor cores sum: tests/cuda_emulator/tensor_core.h. The default rounds to nearest."""

    block: int = 0
    extra_bits: int = 0


TENSOR_CORES = {"A100": TensorCore(8, 1), "H100": TensorCore(16, 2)}


@contextmanager
def emulated_operators(
    seed: int, limits: Limits = H100, num_sms: int = 3, tensor_core: TensorCore = TensorCore()
) -> Iterator[None]:
    """Within it the operators on CPU tensors are those of CUDA. The seed decides which thread runs
    when; on a few multiprocessors each block has several outputs of a small problem."""
    load()
    limits = replace(limits, num_sms=num_sms)
    torch.ops.tree_attention_emulator.install(seed, *astuple(limits))
    torch.ops.tree_attention_emulator.set_tensor_core(*astuple(tensor_core))
    try:
        yield
    finally:
        torch.ops.tree_attention_emulator.uninstall()


@contextmanager
def emulated_streams() -> Iterator[None]:
    """Within `emulated_operators`: what ranks launch here runs at its end, side by side."""
    torch.ops.tree_attention_emulator.begin_streams()
    try:
        yield
    finally:
        torch.ops.tree_attention_emulator.run_streams()


def check_capability(op: str, device: str, major: int, minor: int) -> None:
    """What CUDA operators ask of a device before anything else."""
    load()
    torch.ops.tree_attention_emulator.check_capability(op, device, major, minor)


@dataclass
class Plan:
    """What the host decides for a problem on a GPU."""

    row_tile: int
    num_threads: int
    blocks_per_sm: int
    num_stages: int
    shared_bytes: int


def plan(
    dtype: torch.dtype, head_dim: int, num_rows: int, limits: Limits,
    kv_dtype: torch.dtype | None = None,
) -> Plan:  # fmt: skip
    """The plan of a launch. `kv_dtype` is the dtype of keys and values if they have 8 bits."""
    load()
    shape = dtype, kv_dtype or dtype, head_dim, num_rows
    return Plan(*torch.ops.tree_attention_emulator.plan(*shape, *astuple(limits)))


@functools.cache
def load() -> None:
    objects = emulator_build.COMPILER.compile(KERNELS) + COMPILER.compile(BRIDGE)
    torch.ops.load_library(COMPILER.link("emulated.so", objects, ["-shared", *LIBRARIES]))
