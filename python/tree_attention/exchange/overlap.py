# SPDX-License-Identifier: BSD-3-Clause
"""Exchanging what is computed already, beside the thread or stream that computes the rest.

Where the host waits for messages, exchanges run in a thread that ends with the call. NCCL queues
them: they go to a stream of their own, and a CUDA graph can capture both.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack

import torch

from .._loader import load

Step = Callable[[], None]


class Overlap:
    """Runs exchanges of tensors of a device beside computations, call after call.

    Args:
        host_waits: whether the host waits in an exchange.
    """

    def __init__(self, device: torch.device, host_waits: bool) -> None:
        self._host_waits = host_waits
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def run(
        self,
        computations: Iterable[Step],
        exchanges: Sequence[Step],
        fail: Callable[[BaseException], None],
    ) -> None:
        """Exchange i follows computation i and exchange i - 1.

        The first error ends all and is raised. `fail` is told of it, so that it ends the exchange
        that is under way.
        """
        current = None
        if self._stream is not None:
            current = torch.cuda.current_stream(self._stream.device)
        worker = None
        try:
            if self._host_waits:
                worker = _Worker(self._aside)
            for compute, exchange in zip(computations, exchanges, strict=True):
                compute()
                step = self._after(current, exchange)
                if worker is None:
                    with self._aside():
                        step()
                elif not worker.submit(step):
                    break
            if worker is not None:
                worker.finish()
        except BaseException as error:
            fail(error)
            if worker is not None:
                worker.join()
            raise
        finally:
            if current is not None and self._stream is not None:
                # Also after an error: memory of the caller's is in use there.
                current.wait_stream(self._stream)

    def _after(self, current: torch.cuda.Stream | None, exchange: Step) -> Step:
        """`exchange`, once what is queued on `current` now is done."""
        if current is None:
            return exchange
        computed = current.record_event()

        def run() -> None:
            assert self._stream is not None
            self._stream.wait_event(computed)
            exchange()

        return run

    def _aside(self) -> ExitStack:
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
        """False once a step has failed."""
        self._steps.put(step)
        return not self._errors

    def finish(self) -> None:
        """Raises what a step has raised, when all are done."""
        self.join()
        if self._errors:
            raise self._errors[0]

    def join(self) -> None:
        """Waits for the step under way and those before it, and ends the thread."""
        self._steps.put(None)
        self._thread.join()

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
