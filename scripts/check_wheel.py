# SPDX-License-Identifier: BSD-3-Clause
"""A short run of the installed package, which `scripts/wheels` makes with every torch that a wheel
is for: each part of torch that the extension calls, against plain PyTorch. It imports nothing else
of this tree. Prints what it ran with."""

import importlib.metadata
import platform

import torch
from packaging.requirements import Requirement

import tree_attention
from tree_attention import append_kv, lean_decode, lean_schedule, merge_states
from tree_attention.reference import quantise


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), enable_gqa=True
    )


def check(name: str, o: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    error = (o.double() - expected).abs().max().item()
    assert error <= tolerance, f"{name}: error {error}, {tolerance} is allowed"


def refuses(words: str, call, *arguments) -> None:
    try:
        call(*arguments)
    except RuntimeError as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"nothing was refused where '{words}' was expected")


def main() -> None:
    requirements = map(Requirement, importlib.metadata.requires("tree-attention") or ())
    (required,) = (r.specifier for r in requirements if r.name == "torch" and not r.marker)
    assert torch.__version__ in required, f"torch{required}, but {torch.__version__} is installed"

    torch.manual_seed(0)
    q, k, v = torch.randn(2, 8, 1, 64), torch.randn(2, 2, 999, 64), torch.randn(2, 2, 999, 64)
    expected = attention(q, k, v)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)):
        rounded = [x.to(dtype) for x in (q, k, v)]
        check(str(dtype), lean_decode(*rounded)[0], attention(*rounded), tolerance)

    caches = [torch.zeros(2, 2, 1024, 64, dtype=torch.int8) for _ in "kv"]
    scales = [torch.ones(2, 2, 1024) for _ in "kv"]
    slots = torch.arange(999).expand(2, -1)
    append_kv(k, v, *caches, slots, k_scale=scales[0], v_scale=scales[1])
    assert torch.equal(caches[0][:, :, :999], quantise(k, torch.int8)[0])
    seen = torch.tensor([0, 999], dtype=torch.int32).expand(2, 1, 2)
    o, _ = lean_decode(q, *caches, seen, k_scale=scales[0], v_scale=scales[1])
    check("int8", o, expected, 2e-2)

    base = torch.zeros(2, 2, 1024, 64)
    lazy = base._lazy_clone()  # shares memory with `base` until it is written
    append_kv(k, v, lazy, torch.zeros_like(base), slots)
    assert torch.equal(lazy[:, :, :999], k) and not base.any(), "append_kv wrote to a lazy copy"

    parts = [lean_decode(q, k[:, :, a:b], v[:, :, a:b]) for a, b in ((0, 500), (500, 999))]
    o_parts, lse_parts = map(torch.stack, zip(*parts, strict=True))
    check("merge", merge_states(o_parts, lse_parts)[0], expected, 1e-5)
    assert lean_schedule(torch.tensor([3, 4], dtype=torch.int32), 2).shape[1] == 4

    def step(q, k, v):
        return lean_decode(q * 2, k, v, softmax_scale=1 / 16)[0] + 1

    check("torch.compile", torch.compile(step, fullgraph=True)(q, k, v) - 1, expected, 1e-5)
    refuses("got float64", lean_decode, q.double(), k, v)
    refuses("must not require a gradient", lean_decode, q.clone().requires_grad_(), k, v)
    built = tree_attention._loader.load().build_info()["torch_version"]
    print(f"Python {platform.python_version()}, built for {built}, ran with {torch.__version__}")


main()
