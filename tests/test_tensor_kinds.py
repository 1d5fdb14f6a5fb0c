# SPDX-License-Identifier: BSD-3-Clause
"""Tensors that have no rows in this process's memory: a sentence with function, argument, kind and
the way on, before anything is sent."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.masked import masked_tensor

from distributed import on_ranks
from faults import AMPLE
from tree_attention import (
    Communicator,
    all_merge_states,
    all_merge_topk,
    append_kv,
    index_topk,
    lean_decode,
    lean_schedule,
    merge_states,
    merge_topk,
    patterns,
    positions,
    ring_decode,
    ring_pass_q_decode,
    tree_decode,
)

Q, K = torch.randn(1, 2, 1, 16), torch.randn(1, 2, 8, 16)
LSE, SLOT = torch.zeros(1, 2, 1), torch.zeros(1, 1).long()
RANGES = torch.tensor([[[[0, 4]]]]).int()


class Dispatching(Tensor):
    """A class of somebody else's, whose operators mean something else."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"Dispatching has no {func}")


def dispatching(x: Tensor) -> Tensor:
    return torch.Tensor._make_wrapper_subclass(Dispatching, x.shape, dtype=x.dtype)


def nested(layout: torch.layout) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.nested.nested_tensor([x[0], x[0]], layout=layout)


# By kind: makes one of a tensor, what is said of it and the way on, of an argument `{}`.
KINDS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "jagged": (nested(torch.jagged), "a nested tensor: give torch.nested.to_padded_tensor({}, "),
    "nested": (nested(torch.strided), "a nested tensor: give torch.nested.to_padded_tensor({}, "),
    "masked": (
        lambda x: masked_tensor(x, torch.ones_like(x).bool()),
        "a MaskedTensor: give {}.get_data(), and what queries see as key_ranges",
    ),
    "sparse": (lambda x: x.to_sparse(), "one of layout torch.sparse_coo: give {}.to_dense()"),
    "mkldnn": (lambda x: x.float().to_mkldnn(), "one of layout torch._mkldnn: give {}.to_dense()"),
    "quantized": (
        lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8),
        "a quantized one (torch.qint8): give {}.dequantize()",
    ),
    "other class": (dispatching, "a test_tensor_kinds.Dispatching: convert it to a plain tensor"),
}  # fmt: skip
WORLD = Communicator()
# By the argument that is of another kind: a call.
CALLS: dict[str, tuple[Tensor, Callable[[Any], Any]]] = {
    "lean_decode: q": (Q, lambda x: lean_decode(x, K, K)),
    "lean_decode: k": (K, lambda x: lean_decode(Q, x, K)),
    "lean_decode: v": (K, lambda x: lean_decode(Q, K, x)),
    "lean_decode: key_ranges": (RANGES, lambda x: lean_decode(Q, K, K, x)),
    "lean_decode: k_scale": (LSE, lambda x: lean_decode(Q, K, K, k_scale=x, v_scale=LSE)),
    "lean_decode: page_table": (SLOT, lambda x: lean_decode(Q, K, K, page_table=x)),
    "lean_decode: o": (Q, lambda x: lean_decode(Q, K, K, out=(x, LSE.clone()))),
    "tree_decode: q": (Q, lambda x: tree_decode(x, K, K, group=WORLD)),
    "tree_decode: k_local": (K, lambda x: tree_decode(Q, x, K, group=WORLD)),
    "ring_decode: v_local": (K, lambda x: ring_decode(Q, K, x, group=WORLD)),
    "ring_pass_q_decode: q": (Q, lambda x: ring_pass_q_decode(x, K, K, group=WORLD)),
    "all_merge_states: o": (Q, lambda x: all_merge_states(x, LSE, WORLD)),
    "all_merge_states: lse": (LSE, lambda x: all_merge_states(Q, x, WORLD)),
    "all_reduce: x": (Q, WORLD.all_reduce),
    "all_gather: x": (Q, lambda x: WORLD.all_gather(x, [16])),
    "merge_states: o_parts": (Q, lambda x: merge_states(x, LSE)),
    "index_topk: q": (Q, lambda x: index_topk(x, K[:, :1], topk=1)),
    "index_topk: key_slots": (SLOT, lambda x: index_topk(Q, K[:, :1], topk=1, key_slots=x)),
    "merge_topk: scores": (LSE, lambda x: merge_topk(x, LSE.int(), topk=1)),
    "all_merge_topk: slots": (SLOT, lambda x: all_merge_topk(LSE, x, WORLD, topk=1)),
    "by_rows: rows": (SLOT, lambda x: patterns.by_rows(Q, K, K, x)),
    "append_kv: k": (Q, lambda x: append_kv(x, Q, Q.clone(), Q.clone(), SLOT)),
    "append_kv: v_cache": (Q, lambda x: append_kv(Q, Q, Q.clone(), x, SLOT)),
    "window: slots": (SLOT, lambda x: patterns.window(x, 1)),
    "decode_with_range_bias: bias": (
        torch.zeros(2, 1),
        lambda x: positions.decode_with_range_bias(Q, K, K, RANGES, x),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CALLS)
def test_other_kinds(name: str, kind: str) -> None:
    make, said = KINDS[kind]
    x, call = CALLS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of prototypes
        other = make(x)
        with pytest.raises(TypeError) as caught:
            call(other)
    argument = name.split(": ")[1]
    begin = f"{name} must be a dense tensor, got {said.format(argument)}"
    assert str(caught.value).startswith(begin), caught.value


@pytest.mark.parametrize("name", CALLS)
def test_arrays(name: str) -> None:
    x, call = CALLS[name]
    with pytest.raises(TypeError) as caught:
        call(x.numpy())
    said = str(caught.value)
    assert said.startswith(f"{name} must be a tensor, got array(") and "\n" not in said
    assert said.endswith(f"; torch.as_tensor({name.split(': ')[1]}) makes one")


def test_num_tiles() -> None:
    with pytest.raises(TypeError, match="lean_schedule: num_tiles must be a tensor, got array"):
        lean_schedule(np.array([1, 2]), 2)  # type: ignore[arg-type]


def test_classes_whose_rows_are_read() -> None:
    """Parameters, plain subclasses, and results of functional collectives."""
    plain: type[Tensor] = type("Plain", (Tensor,), {})
    for make in (lambda x: torch.nn.Parameter(x, False), torch.nn.Buffer, AsyncCollectiveTensor,
                 lambda x: x.as_subclass(plain), torch._neg_view):  # fmt: skip
        q = make(Q.clone())
        expected = lean_decode(-Q if make is torch._neg_view else Q, K, K)
        for got in (lean_decode(q, K, K), tree_decode(q, K, K, group=WORLD)):
            assert torch.equal(torch.as_tensor(got[0]), expected[0])
        assert WORLD.all_reduce(q).shape == Q.shape


def test_vmap() -> None:
    """The local operators run for each part; what writes or sends has a batch of its own."""
    both = torch.stack([Q, 2 * Q])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch: slow
        o = torch.vmap(lambda x: lean_decode(x, K, K)[0])(both)
    torch.testing.assert_close(o[1], lean_decode(2 * Q, K, K)[0])
    calls: dict[str, Callable[[Tensor], Any]] = {
        "tree_decode: q": lambda x: tree_decode(x, K, K, group=WORLD)[0],
        "ring_decode: q": lambda x: ring_decode(x, K, K, group=WORLD)[0],
        "all_merge_states: o": lambda x: all_merge_states(x, LSE, WORLD)[0],
        "all_reduce: x": WORLD.all_reduce,
        "append_kv: k": lambda x: append_kv(x, x, Q.clone(), Q.clone(), SLOT),
    }
    for name, call in calls.items():
        op = name.split(":")[0]
        message = f"^{name} must not be a part that torch.vmap has made: call {op} with the batch"
        with pytest.raises(TypeError, match=message):
            torch.vmap(call)(both)


@on_ranks(2)
def test_distributed_tensors(rank: int, world_size: int) -> None:
    """Nothing was sent: the ranks go on, also where one alone has given such a tensor."""
    comm, mesh = Communicator(timeout=AMPLE), init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    other = distribute_tensor(torch.ones(1, 2, 1, 16), mesh, [Replicate()])
    calls: dict[str, Callable[[], Any]] = {
        "lean_decode: q": lambda: lean_decode(other, K, K),
        "tree_decode: q": lambda: tree_decode(other, K, K, group=comm),
        "all_merge_states: o": lambda: all_merge_states(other, LSE, comm),
        "all_reduce: x": lambda: comm.all_reduce(other),
        "all_gather: x": lambda: comm.all_gather(other, [16, 16]),
    }
    for name, call in calls.items():
        with pytest.raises(TypeError) as caught:
            call()
        argument = name.split(": ")[1]
        way = f"give this rank's part, {argument}.to_local()"
        assert str(caught.value) == f"{name} must be a dense tensor, got a DTensor: {way}"
    assert comm.bytes_sent == 0 and comm.failed is None
    assert comm.all_reduce(other.to_local()).sum() == 64.0
    for make in (Communicator, lambda group: tree_decode(Q, K, K, group=group)):
        way = r"DeviceMesh.*; give one of its groups, mesh.get_group\(NAME\)$"
        with pytest.raises(ValueError, match=f"group must be a process group .* got {way}"):
            make(mesh)
    assert Communicator(mesh.get_group("x")).world_size == dist.get_world_size()
