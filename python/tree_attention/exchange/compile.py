# SPDX-License-Identifier: BSD-3-Clause
"""Collective functions as operators that a compiled graph can hold.

`torch.compile` traces no process group. While it traces, a collective function calls the operator
of its name instead, which calls the function when the graph runs. A group is a string there.
Operators keep an order, so that every rank runs the operators of a graph in the program's order.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from .communicator import Communicator, get_communicator
from .options import check_no_gradient

_library = torch.library.Library("tree_attention", "FRAGMENT")
_Function = TypeVar("_Function", bound=Callable[..., Any])


def collective(schema: str, fake: Callable[..., object]) -> Callable[[_Function], _Function]:
    """Makes a function with an argument `group` one that compiled graphs can call.

    `schema` has its arguments and results as an operator has them, its group a `str? group=None`.
    `fake` makes outputs from shapes alone, of the same arguments with a Communicator for the group.
    """

    def decorate(function: _Function) -> _Function:
        name = function.__name__
        op = add_operator(schema, function, fake)

        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            if not torch.compiler.is_compiling():
                return function(*args, **options)
            tensors = [x for x in (*args, *options.values()) if isinstance(x, Tensor)]
            check_no_gradient(name, "its tensors", *tensors)
            return op(*map(_in_graph, args), **{n: _in_graph(x) for n, x in options.items()})

        return cast("_Function", call)

    return decorate


def add_operator(
    schema: str, function: Callable[..., object], fake: Callable[..., object], group: str = "group"
) -> Any:
    """The operator that calls `function` in graphs, as `collective` has it; `group` is the name of
    the argument that is a group."""
    name, signature = function.__name__, inspect.signature(function)

    def with_group(call: Callable[..., object]) -> Callable[..., object]:
        def run(*args: object, **options: object) -> object:
            given = signature.bind(*args, **options).arguments
            given |= given.pop("options", {})
            return call(**given | {group: _named(given.get(group))})

        return run

    _library.define(f"{name}{schema}")
    _library.impl(name, with_group(function), "CompositeExplicitAutograd")
    torch.library.register_fake(f"tree_attention::{name}", with_group(fake), lib=_library)
    op = getattr(torch.ops.tree_attention, name).default
    torch.library._register_effectful_op(op, torch.library.EffectType.ORDERED, lib=_library)
    return op


def _in_graph(x: Any) -> Any:
    """The argument as a graph holds it: a group by its name."""
    if isinstance(x, Tensor):  # torch.compile reads no attribute of it
        return x
    if isinstance(x, Communicator):
        return x.name
    return x.group_name if isinstance(x, dist.ProcessGroup) else x


def _named(name: str | None) -> Communicator:
    """The communicator of a name that `_in_graph` gave; None is the world."""
    if name is None:
        return get_communicator()
    comm = Communicator.by_name.get(name)
    if comm is not None:
        return comm
    return get_communicator(dist.distributed_c10d._resolve_process_group(name))  # type: ignore[arg-type]
