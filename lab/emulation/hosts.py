# SPDX-License-Identifier: BSD-3-Clause
"""Programs on the hosts of an emulated cluster."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from types import FrameType, TracebackType
from typing import IO, Any, NoReturn

from .network import EmulatedNetwork, host_name
from .wiring import Wiring

MASTER_PORT = 29500
# When a host has failed the others may notice by themselves, as ranks that lost a peer should.
_GRACE_SECONDS = 40.0
_EXIT_SECONDS = 5.0
_PR_SET_PDEATHSIG = 1


class EmulatedCluster:
    """A network for the time of a `with` block, and what runs on its hosts."""

    def __init__(self, wiring: Wiring, num_hosts: int) -> None:
        self.wiring, self.num_hosts = wiring, num_hosts

    def __enter__(self) -> EmulatedCluster:
        self._network = EmulatedNetwork(self.wiring, self.num_hosts)
        self.relay = self._network.relay
        self._running: list[subprocess.Popen[Any]] = []
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.stop()
        finally:
            self._network.close()

    def start(
        self,
        host: int,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        **options: Any,
    ) -> subprocess.Popen[Any]:
        """Runs a program on a host; it ends with this process at the latest.

        In its environment is what torch.distributed asks for where every host is a rank, and which
        device to use; torchrun replaces the ranks for those that it starts.
        """
        enter = ["ip", "netns", "exec", self._network.names[host], "unshare", "--uts"]
        rename = ["sh", "-c", 'hostname "$0" && exec "$@"', host_name(host)]
        process = subprocess.Popen(
            [*enter, *rename, *command],
            env={**os.environ, **self._environment(host), **(environment or {})},
            preexec_fn=self._prepare(host),
            start_new_session=True,
            **options,
        )
        self._running.append(process)
        return process

    def run(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        label: bool = False,
        quiet: bool = False,
    ) -> int:
        """Runs a program once on each host and returns the first exit status that is not 0.

        After a failure the others have 40 seconds. `label`: with the host before every line.
        `quiet`: without what it prints, but with its errors.
        """
        options: dict[str, Any] = {"stdout": subprocess.DEVNULL} if quiet else {}
        if label:
            options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        processes = [
            self.start(host, command, environment, **options) for host in range(self.num_hosts)
        ]
        copies = [
            threading.Thread(target=_copy, args=(process.stdout, host_name(host)))
            for host, process in enumerate(processes)
            if label
        ]
        for copy in copies:
            copy.start()
        status, deadline = 0, float("inf")
        while any(process.poll() is None for process in processes):
            failed = [process.returncode for process in processes if process.returncode]
            if failed and not status:
                status, deadline = failed[0], time.monotonic() + _GRACE_SECONDS
            if time.monotonic() > deadline:
                self.stop()
            time.sleep(0.05)
        for copy in copies:
            copy.join()
        return status or next((p.returncode for p in processes if p.returncode), 0)

    def stop(self) -> None:
        """Ends what was started and still runs: asks, waits, then insists."""
        for sent, patience in ((signal.SIGTERM, _EXIT_SECONDS), (signal.SIGKILL, _EXIT_SECONDS)):
            for process in self._running:
                if process.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, sent)
            deadline = time.monotonic() + patience
            for process in self._running:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))

    def _environment(self, host: int) -> dict[str, str]:
        names = {"RANK": host, "WORLD_SIZE": self.num_hosts, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
        variables = {name: str(value) for name, value in names.items()}
        variables |= {"MASTER_ADDR": host_name(0), "MASTER_PORT": str(MASTER_PORT)}
        variables |= {f"{name}_SOCKET_IFNAME": "net0" for name in ("GLOO", "NCCL", "TP")}
        if self.wiring.per_node > 1:
            variables["TREE_ATTENTION_NODE"] = f"node{self.wiring.node(host)}"
        return variables

    def _prepare(self, host: int) -> Any:
        cpus = sorted(os.sched_getaffinity(0))
        share = max(1, len(cpus) // self.num_hosts)
        first = host * share % len(cpus)
        libc = ctypes.CDLL(None)

        def prepare() -> None:  # between fork and exec: nothing here takes a lock
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            os.sched_setaffinity(0, cpus[first : first + share])

        return prepare


def exit_on_sigterm() -> None:
    """From now on SIGTERM ends this process as an exception would, which cleans up."""

    def end(number: int, frame: FrameType | None) -> NoReturn:
        signal.signal(number, signal.SIG_IGN)  # once
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)


def _copy(lines: IO[str], name: str) -> None:
    for line in lines:
        sys.stdout.write(f"[{name}] {line}")
        sys.stdout.flush()
