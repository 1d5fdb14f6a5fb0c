# SPDX-License-Identifier: BSD-3-Clause
"""Arithmetic of a function of tensors, counted: its operations, and the longest chain of them."""

from collections.abc import Callable
from math import ceil, log2
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# They move elements and compute none; views are known by their schema.
MOVES = {"clone", "copy_", "stack", "cat", "zeros", "zeros_like", "new_zeros", "ones_like"}
MOVES |= {"empty", "full", "fill_", "scalar_tensor", "_unsafe_view", "_reshape_alias", "index"}
MOVES |= {"index_select", "new_full", "lift_fresh"}
PRODUCTS, REDUCTIONS = {"mm", "bmm"}, {"sum", "amax", "logsumexp"}


class Operations(TorchDispatchMode):
    """Operations on single elements, and how many of them wait for each other at most.

    A function of elements has one for each element of its result and a reduction one for each that
    it reads, in a tree; a product of matrices has two for each term.
    """

    def __init__(self) -> None:
        super().__init__()
        self.number = self.depth = 0
        self._depths: dict[int, int] = {}  # by the address of the memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs, outputs = (
            [x for x in tree_leaves(y) if isinstance(x, Tensor)] for y in (args, result)
        )
        depth = max((self._depths.get(_address(x), 0) for x in inputs), default=0)
        name, size = func._schema.name.removeprefix("aten::"), sum(x.numel() for x in outputs)
        if name in PRODUCTS:
            terms = inputs[0].shape[-1]
            self.number += 2 * terms * size
            depth += 1 + _levels(terms)
        elif name in REDUCTIONS:
            read = inputs[0].numel()
            self.number += read
            depth += _levels(read // max(size, 1))
        elif not (func.is_view or name in MOVES):
            self.number += size
            depth += 1
        for x in outputs:
            self._depths[_address(x)] = depth
        self.depth = max(self.depth, depth)
        return result


def _address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _levels(number: int) -> int:
    return ceil(log2(max(number, 1)))


def counted(compute: Callable[[], Any]) -> tuple[Any, dict[str, int]]:
    with Operations() as operations:
        result = compute()
    return result, {"operations": operations.number, "depth": operations.depth}
