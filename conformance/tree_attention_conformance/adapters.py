# SPDX-License-Identifier: BSD-3-Clause
"""Functions of the kit's conventions from those of an engine's."""

import math
import re
from collections.abc import Callable
from typing import Any

from .arrays import permuted
from .cases import DecodeProblem

AXES = "bhtd"


def adapt(
    function: Callable[..., Any],
    *,
    axes: str = AXES,
    lse_axes: str | None = None,
    lse_base: float = math.e,
    packed: bool = False,
    pairwise: bool = False,
    reduce_scattered: bool = False,
) -> Callable[..., tuple[Any, Any]]:
    """Makes a function that `check_merge` takes, or `check_sharded_decode`, of one with other
    conventions. What a merge takes is converted, and what either returns is converted back.

        adapt(merge_state, axes="(bt)hd", lse_base=2, pairwise=True)  # FlashInfer's

    Args:
        axes: order of the axes of o: p for the parts of a merge, b batch, h heads, t query tokens
            and d head_dim; axes in brackets are one. Without p, parts are the first axis.
        lse_axes: the same of lse; by default that of o without d.
        lse_base: base of the logarithms.
        packed: whether o and lse are one tensor, with lse behind the last element of each row.
        pairwise: whether a merge takes two states, as `o_a, lse_a, o_b, lse_b`. It is given the
            parts one after the other.
        reduce_scattered: whether a rank returns its share of the heads. They are gathered over the
            default group of torch.distributed; or the function returns the states of all ranks.
    """
    axes = axes if "p" in axes or pairwise else f"p{axes}"
    lse_axes = axes.replace("d", "") if lse_axes is None else lse_axes
    lse_axes = lse_axes if "p" in lse_axes or pairwise else f"p{lse_axes}"

    def merge(o_parts: Any, lse_parts: Any) -> Any:
        lse_parts = lse_parts / math.log(lse_base)
        if pairwise:
            o_parts, lse_parts = (
                [_ordered(x, kept, order) for x in parts]
                for parts, kept, order in ((o_parts, AXES, axes), (lse_parts, AXES[:-1], lse_axes))
            )
            state = o_parts[0], lse_parts[0]
            for part in zip(o_parts[1:], lse_parts[1:], strict=True):
                state = function(*state, *part)
            return state
        o_parts = _ordered(o_parts, f"p{AXES}", axes)
        lse_parts = _ordered(lse_parts, f"p{AXES[:-1]}", lse_axes)
        return function(_joined(o_parts, lse_parts)) if packed else function(o_parts, lse_parts)

    def adapted(*inputs: Any) -> tuple[Any, Any]:
        if isinstance(inputs[0], DecodeProblem):
            (problem,), result = inputs, function(*inputs)
            sizes = (*problem.q.shape[:3], problem.v_shards[0].shape[3])
        else:
            result, sizes = merge(*inputs), inputs[0].shape[1:]
        named = dict(zip(AXES, sizes, strict=True))
        states = result if isinstance(result, list) else [result]
        o, lse = zip(*(returned(state, named) for state in states), strict=True)
        if reduce_scattered:
            return _gathered(o, sizes[1]), None if lse[0] is None else _gathered(lse, sizes[1])
        return o[0], lse[0]

    def returned(state: Any, sizes: dict[str, int]) -> tuple[Any, Any]:
        if packed and not isinstance(state, tuple):
            state = state[..., :-1], state[..., -1]
        o, lse = state if isinstance(state, tuple) else (state, None)
        sizes = sizes | ({"h": -1} if reduce_scattered else {})
        o = _restored(o, axes, sizes)
        return o, None if lse is None else math.log(lse_base) * _restored(lse, lse_axes, sizes)

    return adapted


def _ordered(x: Any, axes: str, order: str) -> Any:
    """The axes of x in another order, those in brackets as one."""
    sizes = dict(zip(axes, x.shape, strict=True))
    x = permuted(x, tuple(axes.index(axis) for axis in re.sub(r"[()]", "", order)))
    shape = [math.prod(sizes[axis] for axis in group) for group in _groups(order)]
    return x.reshape(shape) if "(" in order else x


def _restored(x: Any, order: str, sizes: dict[str, int]) -> Any:
    """The axes of a result in the kit's order."""
    axes = re.sub(r"[()p]", "", order)
    x = x.reshape([sizes[axis] for axis in axes]) if "(" in order else x
    return permuted(x, tuple(axes.index(axis) for axis in AXES if axis in axes))


def _groups(order: str) -> list[str]:
    return [group.strip("()") for group in re.findall(r"\(\w+\)|\w", order)]


def _joined(o: Any, lse: Any) -> Any:
    if hasattr(o, "permute"):
        import torch

        return torch.cat([o.float(), lse[..., None]], -1)
    import numpy as np

    return np.concatenate([o, lse[..., None]], -1)


def _gathered(shares: tuple[Any, ...], num_heads: int) -> Any:
    """The heads of all ranks: those that are given, or also those of the others."""
    import torch

    (share, *others) = shares
    if not others and share.shape[1] < num_heads:
        world_size = torch.distributed.get_world_size()
        shares = tuple(torch.empty_like(share.contiguous()) for _ in range(world_size))
        torch.distributed.all_gather(list(shares), share.contiguous())
    return torch.cat(shares, 1) if len(shares) > 1 else share
