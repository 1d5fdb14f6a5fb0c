# SPDX-License-Identifier: BSD-3-Clause
"""`decode.py --device cuda`: graph replays of the operator beside the GPU's other kernels."""

import importlib.util

import torch


def unavailable() -> str | None:
    """Why this benchmark cannot run here; None where it can."""
    if not torch.cuda.is_available():
        return "torch finds no CUDA driver or no device"
    if importlib.util.find_spec("triton") is None:
        return "it needs triton, which is not installed"
    if not has_cuda_kernel("lean_decode"):
        return "the extension has no lean_decode for CUDA: python -m tree_attention info says why"
    return None


def has_cuda_kernel(op: str) -> bool:
    """Tell if the extension implements this operator for CUDA."""
    # Not above: in benchmarks/, a program's own folder, torch finds this package as its `cuda`.
    import tree_attention.ops  # noqa: F401  registers the operators

    name = f"tree_attention::{op}"
    return hasattr(torch.ops.tree_attention, op) and torch._C._dispatch_has_kernel_for_dispatch_key(
        name, "CUDA"
    )
