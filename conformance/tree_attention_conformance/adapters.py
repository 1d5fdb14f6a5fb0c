# SPDX-License-Identifier: BSD-3-Clause
"""Makes functions with the kit's conventions out of an engine's functions."""

import math
import re
from collections.abc import Callable
from typing import Any

from .arrays import nan_like, permuted
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
    out: bool = False,
) -> Callable[..., tuple[Any, Any]]:
    """Makes a function that `check_merge` takes, or `check_sharded_decode`, of one with other
    conventions. What a merge takes is converted, and what either returns is converted back.

    For FlashInfer's `merge_state` it is `adapt(merge_state, axes="(bt)hd", lse_base=2,
    pairwise=True)`.

    For example::

        import math
        from tree_attention import merge_states
        from tree_attention.reference.conformance import adapt, check_merge

        def merge_to_base_2(o_parts, lse_parts):
            o, lse = merge_states(o_parts, lse_parts * math.log(2))
            return o, lse / math.log(2)

        merge = adapt(merge_to_base_2, lse_base=2)
        print(check_merge(merge_to_base_2).passed, check_merge(merge).passed)  # False True

    Args:
        axes: order of the axes of o: p for the parts of a merge, b batch, h heads, t query tokens
            and d head_dim; axes in brackets are one. Without p, parts are the first axis.
        lse_axes: order of the axes of lse; by default the order of o, without d.
        lse_base: base of the logarithms.
        packed: whether o and lse are one tensor, with lse after the last element of each row.
        pairwise: whether a merge takes two states, as `o_a, lse_a, o_b, lse_b`. It is given the
            parts one after the other.
        reduce_scattered: whether a rank returns its share of the heads. They are gathered over the
            default group of torch.distributed; or the function returns the states of all ranks.
        out: whether a merge writes o and lse into its first two arguments, which are added, and
            returns nothing: `lambda o, lse, *states: merge_attn_states(o, *states, lse)`, vLLM's.
    """
    if out and (packed or reduce_scattered):
        raise ValueError("adapt: out goes with neither packed nor reduce_scattered")
    axes = axes if "p" in axes or pairwise else f"p{axes}"
    lse_axes = axes.replace("d", "") if lse_axes is None else lse_axes
    lse_axes = lse_axes if "p" in lse_axes or pairwise else f"p{lse_axes}"

    def merge(o_parts: Any, lse_parts: Any, sizes: dict[str, int]) -> Any:
        lse_parts = lse_parts / math.log(lse_base)
        call = (
            _writing(function, (o_parts, axes), (lse_parts, lse_axes), sizes) if out else function
        )
        if pairwise:
            o_parts, lse_parts = (
                [_ordered(x, kept, order) for x in parts]
                for parts, kept, order in ((o_parts, AXES, axes), (lse_parts, AXES[:-1], lse_axes))
            )
            state = o_parts[0], lse_parts[0]
            for part in zip(o_parts[1:], lse_parts[1:], strict=True):
                state = call(*state, *part)
            return state
        o_parts = _ordered(o_parts, f"p{AXES}", axes)
        lse_parts = _ordered(lse_parts, f"p{AXES[:-1]}", lse_axes)
        return call(_joined(o_parts, lse_parts)) if packed else call(o_parts, lse_parts)

    def adapted(*inputs: Any) -> tuple[Any, Any]:
        if isinstance(inputs[0], DecodeProblem):
            (problem,), result = inputs, function(*inputs)
            sizes = (*problem.q.shape[:3], problem.v_shards[0].shape[3])
            named = dict(zip(AXES, sizes, strict=True))
        else:
            o_parts, lse_parts = inputs
            sizes = o_parts.shape[1:]
            named = dict(zip(AXES, sizes, strict=True))
            result = merge(o_parts, lse_parts, named)
        if result is None:
            return None, None
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


def _writing(
    function: Callable[..., Any], o: tuple[Any, str], lse: tuple[Any, str], sizes: dict[str, int]
) -> Callable[..., Any]:
    """A function that returns what `function` writes into its first two arguments.

    o, lse: an array of the library and dtype, and the order of its axes.
    """

    def call(*states: Any) -> Any:
        made = []
        for like, order in (o, lse):
            groups = _groups(order.replace("p", ""))
            shape = [math.prod(sizes[axis] for axis in group) for group in groups]
            made.append(nan_like(like, shape))
        function(*made, *states)
        return tuple(made)

    return call


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
    """The heads of all ranks: the given ones, and where these are one rank's, the others'."""
    import torch

    (share, *others) = shares
    if not others and share.shape[1] < num_heads:
        world_size = torch.distributed.get_world_size()
        shares = tuple(torch.empty_like(share.contiguous()) for _ in range(world_size))
        torch.distributed.all_gather(list(shares), share.contiguous())
    return torch.cat(shares, 1) if len(shares) > 1 else share
