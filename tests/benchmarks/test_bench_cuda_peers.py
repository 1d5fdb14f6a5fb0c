# SPDX-License-Identifier: BSD-3-Clause
"""Each peer is given the problem of its case: PyTorch's CUDA operators are replaced by what they
are documented to compute, in float32 on the CPU."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

pytest.importorskip("triton")

from bench_problems import SMALL, make_inputs
from benchmarks.cuda import peers, timing
from benchmarks.cuda.cases import CudaCase
from benchmarks.cuda.inputs import Inputs
from tree_attention import lean_decode
from tree_attention.reference import attention

PAGES_256 = CudaCase(heads=(4, 2), head_dim=64, lengths=(300, 500), page_size=256)
RAGGED_QUERIES = CudaCase(heads=(4, 2), head_dim=64, lengths=(30, 50), seqlen_q=3, layout="NHD")


def causal_ranges(batch: int, seqlen_q: int, seqlen_k: int, causal: bool) -> Tensor:
    """Aligned at the last query and the last key, as in FlashAttention from 2.1 on."""
    ends = torch.full((batch, seqlen_q), seqlen_k)
    if causal:
        ends -= torch.arange(seqlen_q - 1, -1, -1)
    return torch.stack([torch.zeros_like(ends), ends], -1)


def flash_op(q: Tensor, k: Tensor, v: Tensor, dropout: float, causal: bool) -> tuple[Tensor, ...]:
    """aten::_scaled_dot_product_flash_attention."""
    assert dropout == 0.0 and q.dtype in (torch.float16, torch.bfloat16)
    ranges = causal_ranges(q.shape[0], q.shape[2], k.shape[2], causal)
    o, lse = attention(q, k, v, ranges, dtype=torch.float32)
    return o.to(q.dtype), lse


class VarlenOp:
    """aten::_flash_attention_forward with one tensor for all sequences."""

    def __init__(self, *extensions: str) -> None:
        arguments = [SimpleNamespace(name=name) for name in ("query", "key", *extensions)]
        self._schema = SimpleNamespace(arguments=arguments)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, query_starts: Tensor, key_starts: Tensor,
        max_q: int, max_k: int, dropout: float, causal: bool, debug_mask: bool, *,
        seqused_k: Tensor | None = None, block_table: Tensor | None = None,
    ) -> tuple[Tensor]:  # fmt: skip
        assert query_starts.dtype == key_starts.dtype == torch.int32 and dropout == 0.0
        assert not debug_mask
        outputs = []
        for b in range(len(query_starts) - 1):
            q_b = q[query_starts[b] : query_starts[b + 1]]
            begin, end = key_starts[b : b + 2].tolist()
            if block_table is None:
                k_b, v_b = k[begin:end], v[begin:end]
            else:
                k_b, v_b = k[block_table[b]].flatten(0, 1), v[block_table[b]].flatten(0, 1)
            used = len(k_b) if seqused_k is None else int(seqused_k[b])
            assert len(q_b) == max_q and used <= max_k
            inputs = (x.transpose(0, 1)[None] for x in (q_b, k_b[:used], v_b[:used]))
            o = flash_op(*inputs, 0.0, causal)[0]
            outputs.append(o[0].transpose(0, 1))
        return (torch.cat(outputs),)


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "FLASH_OP", flash_op)
    monkeypatch.setattr(peers, "VARLEN_OP", VarlenOp("seqused_k", "block_table"))
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


def assert_same_problem(case: CudaCase, inputs: Inputs, call: Any) -> None:
    kv = inputs.sets[1]
    truth, _ = lean_decode(
        inputs.q.float(), kv.k.float(), kv.v.float(), inputs.key_ranges,
        page_table=inputs.page_table,
    )  # fmt: skip
    for i in (0, 1):
        torch.testing.assert_close(call(i).float(), truth, rtol=0.02, atol=0.02)


def result_of(call: Any) -> Any:
    """A call that returns o alone."""
    return lambda i: call(i)[0]


MAKERS = {
    "unsplit": lambda case, inputs: result_of(peers.unsplit(case, inputs)),
    "flash": peers.flash,
    "varlen": peers.flash_varlen,
    "each": peers.flash_each,
    # Not every torch has cuDNN's operator on the CPU: any backend gets the same arguments.
    "cudnn": lambda case, inputs: peers.cudnn(case, inputs, SDPBackend.MATH),
    "flex": peers.flex,
}
UNIFORM, CAUSAL, RAGGED, CAPACITY, PACKED, WINDOW = SMALL[:6]
ONE_WINDOW = CudaCase(heads=(4, 2), head_dim=64, lengths=(70, 70), window=20)
FLEX = {
    "flex uniform": CudaCase(heads=(4, 2), head_dim=64, lengths=(70,), flex=True),
    "flex ragged": CudaCase(heads=(4, 1), head_dim=64, lengths=(3, 70), layout="NHD", flex=True),
    "flex causal": CudaCase(heads=(4, 2), head_dim=64, lengths=(70,), seqlen_q=4, flex=True),
}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("unsplit", UNIFORM),
        ("unsplit", CAUSAL),
        ("unsplit", ONE_WINDOW),
        ("flash", UNIFORM),
        ("flash", CAUSAL),
        ("flash", CAPACITY),
        ("flash", ONE_WINDOW),
        ("varlen", RAGGED),
        ("varlen", CAPACITY),
        ("varlen", PACKED),
        ("varlen", PAGES_256),
        ("varlen", RAGGED_QUERIES),
        ("each", RAGGED),
        ("each", PACKED),
        ("each", RAGGED_QUERIES),
        ("cudnn", UNIFORM),
        ("cudnn", CAUSAL),
        ("cudnn", CAPACITY),
        *(("flex", case) for case in FLEX.values()),
    ],
    ids=lambda x: x if isinstance(x, str) else x.name,
)
def test_peers_are_given_the_same_problem(name: str, case: CudaCase) -> None:
    with torch.inference_mode():
        inputs = make_inputs(case)
        assert_same_problem(case, inputs, MAKERS[name](case, inputs))


@pytest.mark.parametrize(
    ("name", "case", "why"),
    [
        ("flash", CudaCase(dtype="fp32", heads=(4, 2), head_dim=64, lengths=(9,)), "16-bit only"),
        ("flash", RAGGED, "one length for all and no pages"),
        ("flash", PAGES_256, "one length for all and no pages"),
        (
            "cudnn",
            CudaCase(heads=(4, 2), head_dim=64, lengths=(70,), window=20, seqlen_q=3),
            "no windows of several queries",
        ),
        ("varlen", UNIFORM, "for lengths on the device only"),
        ("varlen", SMALL[7], "pages of 256 slots only"),
        ("flash", SMALL[9], "no keys and values of 8 bits"),
        ("flex", SMALL[13], "not compiled for this row"),
        ("unsplit", RAGGED, "for one length of all sequences"),
        (
            "unsplit",
            CudaCase(heads=(8, 1), head_dim=64, lengths=(9,), seqlen_q=9),
            "64 packed rows",
        ),
        ("each", UNIFORM, "for ragged batches only"),
        ("flex", UNIFORM, "not compiled for this row"),
    ],
)
def test_peers_say_what_they_cannot_do(name: str, case: CudaCase, why: str) -> None:
    with pytest.raises(peers.Unavailable, match=why):
        MAKERS[name](case, make_inputs(case))


def test_varlen_of_an_older_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "VARLEN_OP", VarlenOp("seqused_k"))
    with pytest.raises(peers.Unavailable, match="takes no pages"):
        peers.flash_varlen(PAGES_256, make_inputs(PAGES_256))
    monkeypatch.setattr(peers, "VARLEN_OP", VarlenOp())
    with pytest.raises(peers.Unavailable, match="takes no lengths beside the capacity"):
        peers.flash_varlen(RAGGED, make_inputs(RAGGED))
    assert_same_problem(PACKED, inputs := make_inputs(PACKED), peers.flash_varlen(PACKED, inputs))


def test_real_operators_take_these_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes only, on the meta device: the schemas of this torch fit the calls."""
    monkeypatch.undo()
    q, kv = torch.empty(2, 4, 1, 64, device="meta"), torch.empty(2, 2, 70, 64, device="meta")
    schemas = {op: op._schema for op in (peers.FLASH_OP, peers.VARLEN_OP)}
    names = [argument.name for argument in schemas[peers.FLASH_OP].arguments]
    assert names[:5] == ["query", "key", "value", "dropout_p", "is_causal"]
    names = [argument.name for argument in schemas[peers.VARLEN_OP].arguments]
    assert names[:7] == ["query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k"]
    assert names[7:10] == ["dropout_p", "is_causal", "return_debug_mask"]
    assert "seqused_k" in names
    assert peers.FLASH_OP(q, kv, kv, 0.0, False)[0].shape == q.shape


def test_cudnn_without_a_kernel_says_why() -> None:
    with pytest.raises(peers.Unavailable, match=r"[Nn]o (viable|available) "):
        peers.cudnn(UNIFORM, make_inputs(UNIFORM))


def test_the_peer_that_loses_the_device_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its launches fail where the host waits for them, which may be in another's call."""
    lost: list[bool] = []

    def lose(case: CudaCase, inputs: Inputs) -> peers.Call:
        lost.append(True)
        return lambda i: None

    def wait() -> None:
        if lost:
            raise RuntimeError("CUDA error: an illegal instruction was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", wait)
    monkeypatch.setattr(peers.ablations, "load", lambda: False)
    with pytest.raises(timing.DeviceLost, match=r"theirs lost the device: .*illegal instruction"):
        peers.implementations(UNIFORM, make_inputs(UNIFORM), {"theirs": lose})


def test_implementations_are_calls_or_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(multi_processor_count=4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(peers.ablations, "load", lambda: False)
    inputs = make_inputs(RAGGED)
    calls, unavailable = peers.implementations(RAGGED, inputs, {})
    names = {peers.OURS, peers.FLASH, peers.VARLEN, peers.EACH, peers.CUDNN, peers.FLEX}
    names |= {peers.UNSPLIT, *peers.ABLATIONS.values()}
    assert {*calls, *unavailable} == names
    assert not {*calls} & {*unavailable}
    assert {peers.OURS, peers.VARLEN, peers.EACH} == {*calls}
    for name in (peers.OURS, peers.VARLEN, peers.EACH):
        call = calls[name]
        assert_same_problem(RAGGED, inputs, result_of(call) if name == peers.OURS else call)


def test_ablations_are_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def op(name: str, *inputs: Any, **options: Any) -> tuple[Tensor, Tensor]:
        asked.append(name)
        result: tuple[Tensor, Tensor] = lean_decode(*inputs, **options)
        return result

    monkeypatch.setattr(peers.ablations, "load", lambda: True)
    inputs = make_inputs(SMALL[7])
    for name in peers.ABLATIONS:
        monkeypatch.setattr(
            torch.ops.tree_attention_ablations, name, partial(op, name), raising=False
        )
        call = peers.ablation(name, SMALL[7], inputs)
        assert_same_problem(SMALL[7], inputs, result_of(call))
    assert asked == [name for name in peers.ABLATIONS for _ in range(2)]


def test_arms_of_our_own_kernel_by_their_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unsplit: as many as there are outputs. Some rows are also timed with given numbers."""
    asked: dict[str, int] = {}

    def record(*inputs: Any, num_workers: int, **options: Any) -> None:
        asked[name] = num_workers

    monkeypatch.setattr(peers, "lean_decode", record)
    monkeypatch.setattr(peers.ablations, "load", lambda: False)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=4)
    )
    for case in (peers.LATENCY, CAUSAL):
        asked.clear()
        calls, _ = peers.implementations(case, make_inputs(case), {})
        for name in calls:
            if name in (peers.OURS, *peers.SCHEDULES):
                calls[name](0)
        outputs = case.batch * case.heads[1]
        arms = peers.WORKERS if case in peers.WORKERS_TRIED else {}
        assert asked == {peers.OURS: 0, peers.UNSPLIT: outputs, **arms}
