# SPDX-License-Identifier: BSD-3-Clause
"""Errors of the CUDA kernels by how tensor cores sum, on the emulated device: prints the table of
docs/numerics.md. `PYTHONPATH=python:tests python tests/cuda/tensor_core_errors.py` (5 minutes)"""

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.harness.accuracy import Float64Check
from emulated import TENSOR_CORES, TensorCore, emulated_operators
from tree_attention import lean_decode
from tree_attention.reference.accuracy import Accuracy

HEAD_DIM = 64
ALL_ONES = 2 - 2**-10  # every digit of float16 is one


@dataclass
class MeanOfValues:
    """Equal scores, and values that are one number or lie about 0.5: a warp's sum of values only
    grows, and what is cut off from it has one sign. One block has all keys of the rows, as where
    there are many outputs."""

    keys: int
    rows: int = 16  # query heads of the kv head
    value: float | None = None
    dtype: torch.dtype = torch.float16

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        q, k, v = (
            torch.randn(1, heads, n, HEAD_DIM, generator=generator)
            for heads, n in ((self.rows, 1), (1, 1), (1, self.keys))
        )
        v = v + 0.5 if self.value is None else torch.full_like(v, self.value)
        self.inputs = q.to(self.dtype), k.to(self.dtype).expand_as(v), v.to(self.dtype)
        self.check = Float64Check(*self.inputs, None)

    def run(self, core: TensorCore) -> tuple[Tensor, Tensor]:
        with emulated_operators(0, tensor_core=core):
            o, lse = lean_decode(*self.inputs, num_workers=1)
        return o, lse

    def accuracy(self, core: TensorCore) -> Accuracy:
        return self.check.accuracy(*self.run(core))


def main() -> None:
    print("| values | rows | keys | rounding | A100 | H100 | bound |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for value, rows in ((None, 8), (None, 16), (None, 48), (ALL_ONES, 16)):
        for keys in (1 << 16, 1 << 18, 1 << 20):
            problem = MeanOfValues(keys, rows, value)
            found = [problem.accuracy(core) for core in (TensorCore(), *TENSOR_CORES.values())]
            errors = " | ".join(f"{x.o_error:.1e}" + " WRONG" * (not x.right) for x in found)
            values = "about 0.5" if value is None else "2 - 2^-10"
            bound = f"{found[0].o_bound:.1e}"
            print(f"| {values} | {rows} | {keys:,} | {errors} | {bound} |", flush=True)


if __name__ == "__main__":
    main()
