# SPDX-License-Identifier: BSD-3-Clause
"""The one-shot exchange: its kernel with virtual ranks, each a stream of one device, and when ranks
may use it. test_symmetric.py is about the memory that it needs, and
tests/cuda_emulator/test_one_shot.cpp has the kernel's own tests."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from distributed import run_ranks
from emulated import emulated_streams
from helpers import INF, NAN, assert_same_bits
from tree_attention import ExchangeError, merge_states, strategies
from tree_attention.exchange import Communicator, Topology
from tree_attention.exchange.strategies import Context, one_shot
from tree_attention.exchange.transport import symmetric_memory
from tree_attention.exchange.transport.buffers import StateBuffers, StateLayout
from tree_attention.exchange.transport.messages import SAME_CALL

OP = "one_shot"
CPU = torch.device("cpu")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

State = tuple[Tensor, Tensor]


class VirtualRanks:
    """Ranks of this process on one device, whose launches run side by side."""

    def __init__(self, world_size: int, device: torch.device, slot_bytes: int = 1 << 16) -> None:
        num_bytes = symmetric_memory.buffer_bytes(world_size, slot_bytes)
        self.device = device
        self.on_gpu = device.type == "cuda" and torch.cuda.is_available()
        self.buffers = torch.zeros(world_size, num_bytes, dtype=torch.uint8, device=device)
        addresses = [buffer.data_ptr() for buffer in self.buffers]
        self.memories = [
            symmetric_memory.SymmetricMemory(rank, addresses, device, slot_bytes)
            for rank in range(world_size)
        ]
        self.streams = [self.new_stream() for _ in range(world_size)]

    def new_stream(self) -> torch.cuda.Stream | None:
        return torch.cuda.Stream(self.device) if self.on_gpu else None

    @contextmanager
    def side_by_side(self) -> Iterator[None]:
        if self.on_gpu:
            torch.cuda.synchronize()
            yield
            torch.cuda.synchronize()
        else:
            with emulated_streams():
                yield

    def launch(self, rank: int, state: State, out: State, seconds: float) -> None:
        stream = self.streams[rank]
        with torch.cuda.stream(stream) if stream is not None else nullcontext():
            self.memories[rank].run(state, out, seconds)

    def run(
        self,
        calls: Sequence[State],
        out_dtype: torch.dtype = FP32,
        ranks: Sequence[int] | None = None,
        seconds: float = 20.0,
    ) -> list[list[State]]:
        """Every rank's results of all calls, whose states are stacked."""
        if ranks is None:
            ranks = range(len(self.memories))
        # Nothing is allocated beside kernels that wait.
        outs = [[outputs(o[rank], out_dtype) for o, _ in calls] for rank in ranks]
        with self.side_by_side():
            for i, (o, lse) in enumerate(calls):
                for rank, out in zip(ranks, outs, strict=True):
                    self.launch(rank, (o[rank], lse[rank]), out[i], seconds)
        return outs


def outputs(o: Tensor, dtype: torch.dtype = FP32) -> State:
    return torch.full_like(o, 7.0, dtype=dtype), torch.full_like(o[..., 0], 7.0, dtype=FP32)


def states(world_size: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> State:
    """States of all ranks; one in three is empty, with NaN for its o."""
    generator = torch.Generator().manual_seed(seed)
    lse = 5 * torch.randn(world_size, *shape[:-1], generator=generator)
    lse[torch.rand(lse.shape, generator=generator) < 1 / 3] = -INF
    o = torch.randn(world_size, *shape, generator=generator)
    return o.masked_fill(lse[..., None] == -INF, NAN).to(dtype), lse


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize(
    "dtype, out_dtype", [(FP32, FP32), (FP32, BF16), (BF16, BF16), (BF16, FP16)]
)
def test_ranks_get_the_bits_of_merge_states(world_size, dtype, out_dtype, cuda_kernels):
    """In call after call of other sizes, also when some ranks are a call ahead."""
    ranks = VirtualRanks(world_size, cuda_kernels)
    shapes = [(1, 4, 1, 64), (2, 9, 1, 128), (1, 1, 1, 8), (2, 9, 1, 128), (3, 2, 2, 72)]
    calls = [states(world_size, shape, dtype, seed) for seed, shape in enumerate(shapes)]
    calls = [(o.to(cuda_kernels), lse.to(cuda_kernels)) for o, lse in calls]
    results = ranks.run(calls, out_dtype)
    for memory, of_rank in zip(ranks.memories, results, strict=True):
        memory.check()
        for result, (o, lse) in zip(of_rank, calls, strict=True):
            assert_same_bits(result, merge_states(o, lse, out_dtype=out_dtype))


def test_missing_rank(cuda_kernels):
    ranks = VirtualRanks(3, cuda_kernels)
    o, lse = (x.to(cuda_kernels) for x in states(3, (2, 9, 1, 64), FP32))
    expected = merge_states(o, lse)
    for (result,) in ranks.run([(o, lse)]):
        assert_same_bits(result, expected)
    for results in ranks.run([(o, lse)] * 2, ranks=(0, 1), seconds=1e-3):
        assert all(x.isnan().all() for result in results for x in result)
    for memory in ranks.memories[:2]:
        with pytest.raises(RuntimeError, match=r"^one_shot: rank 2 did not come in time; outputs"):
            memory.check()
    # Late, it has what the others sent; after that they send nothing.
    ((first, second),) = ranks.run([(o, lse)] * 2, ranks=(2,), seconds=1e-3)
    assert_same_bits(first, expected)
    assert all(x.isnan().all() for x in second)
    with pytest.raises(RuntimeError, match="rank 0 did not come in time, rank 1 did not come in"):
        ranks.memories[2].check()


def test_abort(cuda_kernels):
    ranks = VirtualRanks(2, cuda_kernels)
    ranks.memories[1].abort()
    o, lse = (x.to(cuda_kernels) for x in states(2, (1, 2, 1, 64), FP32))
    (((o, lse),),) = ranks.run([(o, lse)], ranks=(1,), seconds=1e3)
    assert o.isnan().all() and lse.isnan().all()
    with pytest.raises(RuntimeError, match="rank 0 was waited for when this rank was aborted"):
        ranks.memories[1].check()


def test_states_of_different_sizes(cuda_kernels):
    """Captured graphs, of which no host compares sizes any more."""
    ranks = VirtualRanks(2, cuda_kernels)
    shapes = (1, 2, 1, 64), (1, 3, 1, 64)
    own = [
        tuple(x[rank].to(cuda_kernels) for x in states(2, shape, FP32))
        for rank, shape in enumerate(shapes)
    ]
    outs = [outputs(o) for o, _ in own]
    with ranks.side_by_side():
        for rank, (state, out) in enumerate(zip(own, outs, strict=True)):
            ranks.launch(rank, state, out, 1e-2)
    for rank, out in enumerate(outs):
        assert all(x.isnan().all() for x in out)
        with pytest.raises(RuntimeError, match=f"rank {1 - rank} exchanged a state of another"):
            ranks.memories[rank].check()


def test_refused_arguments(cuda_kernels):
    ranks = VirtualRanks(2, cuda_kernels, slot_bytes=1024)
    memory = ranks.memories[0]

    def run(o: Tensor, lse: Tensor, out_o: Tensor | None = None) -> None:
        out = torch.empty_like(o) if out_o is None else out_o, torch.empty_like(lse)
        memory.run((o, lse), out, 1.0)

    o, lse = torch.ones(3, 8, device=cuda_kernels), torch.zeros(3, device=cuda_kernels)
    for message, arguments in {
        "o must be float32 or bfloat16, got float16": (o.half(), lse),
        r"o must be a contiguous float32 \[3, 8\]": (o.t().contiguous().t(), lse),
        r"lse must be a contiguous float32 \[3\] on .*, got float64": (o, lse.double()),
        r"lse must be a contiguous float32 \[3\] on .*, got float32 \[2\]": (o, lse[:2]),
        r"out_o must be a contiguous float32 \[3, 8\] on .*, got float32 \[8\]": (o, lse, o[0]),
        "out_o must be float32, bfloat16 or float16, got float64": (o, lse, o.double()),
        "rows of o must have a size that is a multiple of 16 bytes, got 20": (
            torch.ones_like(o[:, :5]), lse
        ),
        "slot_bytes must be a multiple of 16 and at least 1152, .* got 1024": (
            o.new_ones(32, 8), lse.new_zeros(32), o.new_ones(32, 8)
        ),
        "o must begin at a multiple of 16 bytes, got one 4 bytes beyond": (
            o.new_ones(25)[1:].view(3, 8), lse
        ),
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=f"^one_shot: {message}"):
            run(*arguments)
    memory.rank = 2
    with pytest.raises(ValueError, match=r"one_shot: rank must be in \[0, 2\), got 2"):
        run(o, lse)
    with pytest.raises(
        ValueError, match=r"one_shot: buffers must hold the addresses of 1 to 16 .* got 17"
    ):
        symmetric_memory.SymmetricMemory(0, [0] * 17, cuda_kernels).run((o, lse), (o, lse), 1.0)


def test_refused_messages():
    def refusal(head_dim: int, rows: int = 1, dtype: torch.dtype = FP32) -> str:
        return one_shot.refusal(StateLayout((1, rows, 1), head_dim, dtype))

    assert refusal(128) == refusal(8, dtype=BF16) == refusal(128, rows=4000) == ""
    assert refusal(12) == "head_dim 12 is no multiple of 8"
    assert refusal(128, rows=5000) == "a state of 2580000 bytes is larger than 2097152"


@pytest.mark.gpu("streams side by side")
def test_replayed_graphs_on_cuda(cuda):
    """Epochs are the device's: replays follow calls, and ranks of other replays are waited for."""
    ranks = VirtualRanks(3, cuda)
    o, lse = (x.to(cuda) for x in states(3, (2, 9, 1, 64), FP32))
    ranks.run([(o, lse)])
    graphs, outs = [], []
    for rank, stream in enumerate(ranks.streams):
        graph = torch.cuda.CUDAGraph()
        out = torch.empty_like(o[0]), torch.empty_like(lse[0])
        with torch.cuda.graph(graph, stream=stream):
            ranks.memories[rank].run((o[rank], lse[rank]), out, 20.0)
        graphs.append(graph)
        outs.append(out)
    for seed in range(5):
        for x, changed in zip((o, lse), states(3, (2, 9, 1, 64), FP32, seed), strict=True):
            x.copy_(changed)
        with ranks.side_by_side():
            for graph, stream in zip(graphs, ranks.streams, strict=True):
                with torch.cuda.stream(stream):
                    graph.replay()
        for out in outs:
            assert_same_bits(out, merge_states(o, lse))
    ranks.memories[0]._words[0] = 1_000_000  # nanoseconds: heard by what was captured before
    with ranks.side_by_side(), torch.cuda.stream(ranks.streams[0]):
        graphs[0].replay()
    assert all(x.isnan().all() for x in outs[0])
    with pytest.raises(RuntimeError, match="rank 1 did not come in time, rank 2 did not come in"):
        ranks.memories[0].check()


def ask_for_it(rank: int, world_size: int) -> None:
    """Where it is not available every rank says why, nothing is sent, and "auto" does without."""
    comm = Communicator()
    o, lse = states(world_size, (1, 4, 1, 16), FP32)
    with pytest.raises(ExchangeError, match=rf"rank {rank} of 3: one_shot is not available: "
                       r"tensors are on the cpu, not in the memory of a GPU"):  # fmt: skip
        comm.all_merge_states(o[rank], lse[rank], strategy="one_shot")
    assert comm.failed is None and comm.bytes_sent == 0
    assert_same_bits(comm.all_merge_states(o[rank], lse[rank]), merge_states(o, lse))
    with pytest.raises(ValueError, match=r"strategy must be one of .*, got 'one_shot'"):
        comm.all_merge_states(o[rank], lse[rank], strategy="one_shot", head_sharded=True)
    comm.check()


def test_not_available_on_the_cpu() -> None:
    assert "one_shot" not in strategies()
    run_ranks(ask_for_it, 3)


def exchange_in_shared_memory(rank: int, world_size: int) -> str:
    """Exchanges states between processes that share a GPU, if torch lets them."""
    comm = Communicator(timeout=30.0)
    o, lse = (x.cuda() for x in states(world_size, (2, 4, 1, 64), FP32))
    comm.all_merge_states(o[rank], lse[rank], strategy="all_gather")
    if "one_shot" in comm.unavailable(o.device):
        return comm.unavailable(o.device)["one_shot"]
    for dtype in (FP32, BF16):
        expected = merge_states(o, lse, out_dtype=dtype)
        for _ in range(4):
            assert_same_bits(
                comm.all_merge_states(o[rank], lse[rank], strategy="one_shot", out_dtype=dtype),
                expected,
            )
    torch.cuda.synchronize()
    comm.check()
    return ""


@pytest.mark.gpu("memory that processes share")
def test_processes_on_one_gpu_cuda(cuda, monkeypatch):
    monkeypatch.setenv(symmetric_memory.OVERLAPPING_VARIABLE, "1")
    reasons = run_ranks(exchange_in_shared_memory, 2, fresh=True)
    assert reasons[0] == reasons[1]
    if reasons[0]:
        pytest.skip(reasons[0])


def test_prepared_exchanges(cuda_kernels):
    """What a communicator does, here for all ranks of this process."""
    ranks = VirtualRanks(3, cuda_kernels)
    o, lse = (x.to(cuda_kernels) for x in states(3, (2, 4, 1, 64), FP32))
    exchanges, links = [], []
    for rank in range(3):
        state = StateBuffers().get(o.shape[1:], BF16, o.device)
        state.load(o[rank], lse[rank])
        links.append(
            SimpleNamespace(world_size=3, num_operations=0, bytes_sent=0, call_id=SAME_CALL)
        )
        memory = ranks.memories[rank]
        context = Context(links[-1], Topology((0,) * 3), state, FP16, resource=memory)
        exchanges.append(one_shot.prepare(context))
    outs = [outputs(x, FP16) for x in o]
    with ranks.side_by_side():
        for exchange, stream, out in zip(exchanges, ranks.streams, outs, strict=True):
            with torch.cuda.stream(stream) if stream is not None else nullcontext():
                exchange(time.monotonic() + 20.0, *out)
    for link, out in zip(links, outs, strict=True):
        assert_same_bits(out, merge_states(o.to(BF16), lse, out_dtype=FP16))
        assert (link.num_operations, link.bytes_sent) == (1, 2 * 8 * (2 * 64 + 4))
    ranks.memories[1]._words[symmetric_memory._ERRORS + 2] = 1
    with pytest.raises(RuntimeError, match="one_shot: rank 2 did not come in time"):
        exchanges[1](time.monotonic() + 20.0, *outs[1])
    elsewhere = replace(
        context, resource=symmetric_memory.SymmetricMemory(0, [0], torch.device("meta"))
    )
    with pytest.raises(RuntimeError, match="one_shot was set up on meta, not on"):
        one_shot.prepare(elsewhere)
