# SPDX-License-Identifier: BSD-3-Clause
"""Reformer's reversible layers and chunked feed-forward (arXiv:2001.04451, section 3).

A reversible layer keeps no activation for the backward pass: its inputs follow from its outputs.
These are references for training, which the kernels of this library do not do.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Function = Callable[[Tensor], Tensor]


def forward(x: tuple[Tensor, Tensor], f: Function, g: Function) -> tuple[Tensor, Tensor]:
    """`y1 = x1 + f(x2)`, `y2 = x2 + g(y1)`; f is attention, g the feed-forward."""
    y1 = x[0] + f(x[1])
    return y1, x[1] + g(y1)


def inverse(y: tuple[Tensor, Tensor], f: Function, g: Function) -> tuple[Tensor, Tensor]:
    """`x2 = y2 - g(y1)`, `x1 = y1 - f(x2)`, from the end."""
    x2 = y[1] - g(y[0])
    return y[0] - f(x2), x2


class _Reversible(torch.autograd.Function):
    """All layers at once: only the last outputs are kept."""

    @staticmethod
    def forward(
        ctx: Any, x1: Tensor, x2: Tensor, layers: Any, *weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        y = x1, x2
        for f, g in layers:
            y = forward(y, f, g)
        ctx.layers, ctx.weights = layers, weights
        ctx.save_for_backward(*y)
        return y

    @staticmethod
    def backward(ctx: Any, *grad_y: Tensor) -> tuple[Tensor | None, ...]:
        y: tuple[Tensor, Tensor] = ctx.saved_tensors
        sums = [torch.zeros_like(weight) for weight in ctx.weights]
        for f, g in reversed(ctx.layers):
            x = inverse(y, f, g)
            with torch.enable_grad():
                inputs = x[0].detach().requires_grad_(), x[1].detach().requires_grad_()
                outputs = forward(inputs, f, g)
            wanted = (*inputs, *ctx.weights)
            grads = torch.autograd.grad(outputs, wanted, grad_y, allow_unused=True)
            grad_y, y = (grads[0], grads[1]), x
            sums = [a if b is None else a + b for a, b in zip(sums, grads[2:], strict=True)]
        return *grad_y, None, *sums


def reversible(
    x: tuple[Tensor, Tensor],
    layers: Sequence[tuple[Function, Function]],
    weights: Sequence[Tensor],
) -> tuple[Tensor, Tensor]:
    """The outputs of all layers, whose backward pass recomputes what it needs from them.

    `weights` are the tensors that the functions of the layers use and that want gradients.
    """
    return _Reversible.apply(*x, layers, *weights)


def chunked_feed_forward(x: Tensor, feed_forward: Function, chunks: int) -> Tensor:
    """The feed-forward layer by parts of the tokens: its inner width exists for one."""
    return torch.cat([feed_forward(part) for part in x.chunk(chunks, dim=-2)], dim=-2)
