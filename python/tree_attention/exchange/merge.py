# SPDX-License-Identifier: BSD-3-Clause
"""The door for other engines, and collective functions as operators that a compiled graph can hold.

`torch.compile` traces no process group. While it traces, a collective function calls the operator
of its name instead, which calls the function when the graph runs. A group is a string there.
Operators keep an order, so that every rank runs those of a graph in the program's order.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import Unpack

from ..options import lists_options
from .communicator import Communicator, get_communicator
from .options import (
    MERGE_DEFAULTS,
    MERGE_SCHEMA,
    ExchangeOptions,
    MergeOptions,
    check_no_gradient,
)
from .transport.buffers import StateLayout

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
    """The argument as a graph has it: of a group its name."""
    if isinstance(x, Tensor):  # of which torch.compile asks no more
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


def fake_merge(
    like: Tensor, head_dim: int, group: Communicator, options: Mapping[str, Any]
) -> tuple[Tensor, Tensor]:
    """Outputs of a merge of states with the rows and on the device of `like`."""
    exchange = ExchangeOptions.of("merge", options, like.dtype)
    layout = StateLayout(like.shape[:3], head_dim, exchange.payload_dtype)
    return group.outputs(layout, exchange, like.device)


def _fake(o: Tensor, lse: Tensor, group: Communicator, **options: Any) -> tuple[Tensor, Tensor]:
    return fake_merge(o, o.shape[3], group, options)


@lists_options(MergeOptions, MERGE_DEFAULTS)
@collective(
    f"(Tensor o, Tensor lse, str? group=None, *, {MERGE_SCHEMA}) -> (Tensor o, Tensor lse)", _fake
)
def all_merge_states(
    o: Tensor,
    lse: Tensor,
    group: dist.ProcessGroup | Communicator | None = None,
    **options: Unpack[MergeOptions],
) -> tuple[Tensor, Tensor]:
    """An all-reduce of partial attention states whose operation is `merge_states`.

    Equivalent PyTorch, up to rounding::

        lse = torch.stack(all_gathered_lse).logsumexp(0)
        o = sum((lse_r - lse).exp()[..., None] * o_r for o_r, lse_r in all_gathered_states)

    Collective: every rank calls with its own state of the same queries over its own keys.

    Args:
        o: `[batch, num_heads_q, seqlen_q, head_dim]`, float32, bfloat16 or float16, any strides.
        lse: float32 `[batch, num_heads_q, seqlen_q]`, natural logarithm, any strides; `-inf` for a
            row without keys on this rank, whatever its `o`.
        group: process group or `Communicator`, default the world, of one without torch.distributed.
        strategy: "auto" or one of `strategies()`.
        out_dtype: dtype of the merged `o`, default `o`'s. Arithmetic is float32.
        payload_dtype: dtype in which each rank's `o` travels: float32, or bfloat16 to halve the
            bytes, where every rank, also its own, sees the rounded copy. lse stays float32.
            Ignored in a world of one.
        head_sharded: return to each rank the heads of
            `torch.tensor_split(o, world_size, dim=1)[rank]` only, maybe none.
        timeout: seconds, or a `datetime.timedelta`, in which the call returns or raises, 30 unless
            the communicator says otherwise; a number where torch.compile traces the call.

    Returns:
        New tensors: the merged o and the float32 lse, with the same bits on every rank, which all
        strategies but "three_allreduce" share with `merge_states` of the ranks' states; `(0, -inf)`
        for a row that has no keys on any rank.

    Raises:
        ValueError: there is no such strategy, it cannot do what the options ask for, or shapes or
            dtypes break the rules above. This rank sent nothing; ranks whose arguments were right
            raise ExchangeError at their timeout.
        TypeError: timeout is neither a number nor a timedelta.
        ExchangeError: a rank was lost, stalled, or called with other arguments; or another thread
            uses the group (see `Communicator`).

    Source: Tree Attention (arXiv:2408.04093), section 5.
    """
    return get_communicator(group).all_merge_states(o, lse, **options)


def _fake_sum(x: Tensor, **_: object) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _fake_gather(x: Tensor, counts: list[int], dim: int = -1, **_: object) -> Tensor:
    shape = list(x.shape)
    shape[dim] = sum(counts)
    return x.new_empty(shape)


add_operator(
    "(str? self, Tensor x, *, ScalarType? payload_dtype=None, float? timeout=None) -> Tensor",
    Communicator.all_reduce,
    _fake_sum,
    group="self",
)
add_operator(
    "(str? self, Tensor x, SymInt[] counts, int dim=-1, *, float? timeout=None) -> Tensor",
    Communicator.all_gather,
    _fake_gather,
    group="self",
)
