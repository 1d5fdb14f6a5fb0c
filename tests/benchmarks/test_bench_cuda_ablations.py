# SPDX-License-Identifier: BSD-3-Clause
"""The ablations' operators, from their sources to their results, on the emulated device."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import emulated
import emulator_build
from bench_problems import SMALL, make_inputs
from benchmarks.cuda import ablations, peers
from benchmarks.cuda.cases import CudaCase
from benchmarks.cuda.predict import packed_rows
from benchmarks.harness.accuracy import Float64Check
from tree_attention import lean_decode


@pytest.fixture(scope="module", autouse=True)
def operators() -> None:
    """Of the sources that `ablations.build` compiles, but for those that need a driver."""
    kernels, others = [], []
    own = [ablations.FOLDER / name for name in ablations.SOURCES if name != "ops.cpp"]
    for path in [*own, *(ablations.ROOT / name for name in ablations.PRODUCT_SOURCES)]:
        (kernels if path.suffix == ".cu" else others).append(path)
    others.remove(ablations.ROOT / "csrc/cuda/decode/workspaces.cpp")
    others.append(ablations.ROOT / "tests/cuda_emulator/ablations_extension.cpp")
    objects = emulator_build.COMPILER.compile([*emulator_build.EMULATOR, *map(relative, kernels)])
    objects += emulated.COMPILER.compile([*map(relative, others)])
    libraries = [f"-L{emulated.TORCH}/lib", "-ltorch_cpu", "-lc10"]
    library = emulated.COMPILER.link("ablations.so", objects, ["-shared", *libraries])
    torch.ops.load_library(library)


def relative(path: Path) -> Path:
    return path.relative_to(ablations.ROOT)


@pytest.mark.parametrize(
    "case", [x for x in SMALL[:9] if packed_rows(x) <= 8], ids=lambda case: case.name
)
@pytest.mark.parametrize("op", peers.ABLATIONS)
def test_operators_are_right(op: str, case: CudaCase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ablations, "load", lambda: True)
    inputs = make_inputs(case, 1)
    kv = inputs.sets[0]
    o, lse = peers.ablation(op, case, inputs)(0)
    truth = Float64Check(inputs.q, kv.k, kv.v, inputs.key_ranges, **inputs.options(0))
    assert truth.accuracy(o, lse).right


@pytest.mark.parametrize("case", [SMALL[1], SMALL[9]], ids=["10 rows", "8 bits"])
@pytest.mark.parametrize("op", peers.ABLATIONS)
def test_operators_are_for_cuda_16_bits_and_few_rows(op: str, case: CudaCase) -> None:
    name = f"tree_attention_ablations::{op}"
    assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")
    inputs = make_inputs(case, 1)
    kv = inputs.sets[0]
    with pytest.raises(RuntimeError, match="ablations exist for bfloat16"):
        getattr(torch.ops.tree_attention_ablations, op)(
            inputs.q, kv.k, kv.v, inputs.key_ranges, **inputs.options(0)
        )


@pytest.mark.parametrize("head_dim", [64, 128])
def test_tiles(head_dim: int) -> None:
    """All are right, those of lean_decode's own size have its bits, and others cut elsewhere."""
    case = CudaCase(heads=(4, 2), head_dim=head_dim, lengths=(700, 300))
    inputs = make_inputs(case, 1)
    kv, options = inputs.sets[0], inputs.options(0)
    arguments = (inputs.q, kv.k, kv.v, inputs.key_ranges)
    truth = Float64Check(*arguments, **options)
    with emulated.emulated_operators(0):
        own = lean_decode(*arguments, num_workers=3, **options)
    for keys, stages in ablations.TILES:
        if keys * head_dim > 1 << 14:
            with pytest.raises(RuntimeError, match="error of CUDA"):
                ablations.operator(keys, stages)(*arguments, num_workers=3, **options)
            continue
        result = ablations.operator(keys, stages)(*arguments, num_workers=3, **options)
        assert truth.accuracy(*result).right
        assert torch.equal(result[0], own[0]) == (keys * head_dim == 1 << 13)
