# SPDX-License-Identifier: BSD-3-Clause
"""A call of `tree_decode` in parts: one part is exchanged while the next one computes.

Each part is an ordinary exchange. Where the host waits for messages, exchanges run in a thread that
ends with the call. NCCL queues them: they go to a stream of their own, and a CUDA graph can capture
both.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from ._loader import load
from .exchange import Communicator, ExchangeOptions
from .exchange.state import StateLayout
from .ops import lean_decode

Step = Callable[[], None]

# Which axis of an argument of lean_decode runs over sequences, and which over heads.
_AXES = {
    "q": (0, 1),
    "k": (0, 1),
    "v": (0, 1),
    "k_scale": (0, 1),
    "v_scale": (0, 1),
    "key_ranges": (0, None),
    "alibi_slopes": (None, 0),
    "query_positions": (0, None),
    "page_table": (0, 1),
}


@dataclass(frozen=True)
class Parts:
    """Runs of sequences (axis 0) or, of a single sequence, of heads (axis 1)."""

    axis: int
    bounds: tuple[int, ...]  # in sequences, or in heads of keys and values
    axes: Mapping[str, int]  # along which each argument of lean_decode is cut

    @staticmethod
    def of(arguments: Mapping[str, Any], count: int, head_sharded: bool) -> Parts:
        """`count` parts of a lean_decode call, or fewer where there are fewer sequences or heads.

        Heads that are to be sharded over ranks are not cut into parts as well. A call stays whole
        if an argument is not as long as it should be: a part of the others might fit it by chance.
        """
        batch, num_heads_q = arguments["q"].shape[:2]
        num_heads_kv = arguments["k"].shape[1]
        divisible = num_heads_kv > 0 and num_heads_q % num_heads_kv == 0
        by_heads = batch == 1 and divisible and not head_sharded
        axis, units = (1, num_heads_kv) if by_heads else (0, batch)
        axes = _axes_of(arguments, axis)
        count = 1 if axes is None else max(1, min(count, units))
        bounds = tuple(units * i // count for i in range(count + 1))
        return Parts(axis, bounds, axes or {})

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def part(self, x: Tensor, index: int, axis: int | None = None) -> Tensor:
        """The share of part `index` in `x`, of which `axis` runs over sequences or any heads."""
        axis = self.axis if axis is None else axis
        each = x.shape[axis] // self.bounds[-1]
        begin, end = self.bounds[index], self.bounds[index + 1]
        return x.narrow(axis, begin * each, (end - begin) * each)


def _axes_of(arguments: Mapping[str, Any], part_axis: int) -> dict[str, int] | None:
    """The axis along which each argument is cut; None if one is not as long as it should be."""
    batch, num_heads_q = arguments["q"].shape[:2]
    num_heads_kv, table = arguments["k"].shape[1], arguments.get("page_table")
    heads = {"q": num_heads_q, "alibi_slopes": num_heads_q}
    result = {}
    for name, axes in _AXES.items():
        axis, x = axes[part_axis], arguments.get(name)
        if axis is None or x is None:
            continue
        if table is not None and (
            (name in ("k", "v", "k_scale", "v_scale") and part_axis == 0)  # pages are nobody's
            or (name == "page_table" and part_axis == 1 and x.dim() == 2)  # for all heads
        ):
            continue
        length = batch if part_axis == 0 else heads.get(name, num_heads_kv)
        if x.dim() <= axis or x.shape[axis] != length:
            return None
        result[name] = axis
    return result


def decode_in_parts(
    comm: Communicator,
    parts: Parts,
    arguments: Mapping[str, Any],
    options: ExchangeOptions,
    signature: tuple[tuple[str, object], ...],
    explain: bool,
    seconds: float,
) -> tuple[Tensor, Tensor]:
    """`tree_decode` of several parts, with the arguments of lean_decode by name.

    The first part is computed before ranks agree on the call, so that nothing was sent if
    lean_decode refuses an argument. Each exchange has `seconds`.
    """
    q, v = arguments["q"], arguments["v"]
    with comm.before_call():
        shapes = [(*parts.part(q, i).shape[:3], v.shape[3]) for i in range(len(parts))]
        buffers = [
            comm.state(shape, q.device, options.payload_dtype, part=i)
            for i, shape in enumerate(shapes)
        ]

        def compute(i: int) -> None:
            own = {n: parts.part(arguments[n], i, axis) for n, axis in parts.axes.items()}
            lean_decode(**{**arguments, **own}, out=(buffers[i].o, buffers[i].lse))

        compute(0)
        whole = StateLayout(tuple(q.shape[:3]), v.shape[3], options.payload_dtype)
        outputs = comm.outputs(whole, options, q.device)

    def exchange(i: int) -> None:
        o, lse = (parts.part(x, i) for x in outputs)
        comm.exchange(
            buffers[i], options, (o, lse), time.monotonic() + seconds, explain=explain and i == 0
        )

    def run(deadline: float) -> None:
        host_waits = comm.link.transport_device(q.device).type == "cpu"
        with _Lane(q.device, host_waits, comm.abort) as lane:
            for i in range(len(parts)):
                if i:
                    compute(i)
                if not lane.submit(lambda i=i: exchange(i)):  # type: ignore[misc]
                    break

    fields = (*signature, *comm.fields(whole, options, q.device))
    comm.call("tree_decode", fields, run, seconds, q.device)
    return outputs


class _Lane:
    """Where exchanges run, in order, beside the computation: a thread or a stream.

    Args:
        host_waits: whether the host waits in an exchange.
        abort: ends the exchange under way, given a reason.
    """

    def __init__(
        self, device: torch.device, host_waits: bool, abort: Callable[[str], None]
    ) -> None:
        self._abort = abort
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._current = None if self._stream is None else torch.cuda.current_stream(device)
        self._worker = _Worker(self._surroundings) if host_waits else None

    def __enter__(self) -> _Lane:
        return self

    def submit(self, step: Step) -> bool:
        """Runs `step` once what is queued on the current stream now is done.

        False once a step has failed.
        """
        step = self._after_computation(step)
        if self._worker is not None:
            return self._worker.submit(step)
        with self._surroundings():
            step()
        return True

    def _after_computation(self, step: Step) -> Step:
        if self._stream is None or self._current is None:
            return step
        computed, stream = self._current.record_event(), self._stream

        def run() -> None:
            stream.wait_event(computed)
            step()

        return run

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if self._worker is not None:
                if error is not None:
                    self._abort(f"interrupted by {error!r}")
                self._worker.join()
                if error is None:
                    self._worker.raise_error()
        finally:
            if self._current is not None and self._stream is not None:
                # Also after an error: memory of the caller's is in use there.
                self._current.wait_stream(self._stream)

    def _surroundings(self) -> ExitStack:
        stack = ExitStack()
        if self._stream is not None:
            stack.enter_context(torch.cuda.stream(self._stream))
        return stack


class _Worker:
    """A thread that runs steps in order, in the surroundings of its maker."""

    def __init__(self, surroundings: Callable[[], ExitStack]) -> None:
        self._steps: queue.SimpleQueue[Step | None] = queue.SimpleQueue()
        self._errors: list[BaseException] = []
        arguments = surroundings, torch.is_inference_mode_enabled()
        self._thread = threading.Thread(
            target=self._run, args=arguments, name="tree_attention.exchange", daemon=True
        )
        self._thread.start()

    def submit(self, step: Step) -> bool:
        self._steps.put(step)
        return not self._errors

    def join(self) -> None:
        """Waits for the step under way and those before it, and ends the thread."""
        self._steps.put(None)
        self._thread.join()

    def raise_error(self) -> None:
        if self._errors:
            raise self._errors[0]

    def _run(self, surroundings: Callable[[], ExitStack], inference: bool) -> None:
        # The cores are busy: a team of threads would only be in the way.
        load().use_one_thread()
        try:
            # Both belong to a thread, and outputs of the caller's may be written in its mode only.
            with torch.inference_mode(inference), surroundings():
                while (step := self._steps.get()) is not None:
                    step()
        except BaseException as error:  # raised again in the thread of the caller
            self._errors.append(error)
