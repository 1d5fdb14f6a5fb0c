# SPDX-License-Identifier: BSD-3-Clause
"""`tree-attention doctor` between two hosts: the way there and back, a port where nobody listens,
and packets that are dropped."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lab.emulation import LINKS, EmulatedCluster, unsupported

ROOT = Path(__file__).parents[3]
AMPLE_SECONDS = 200.0


def doctor(cluster: EmulatedCluster, host: int, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tree_attention", "doctor", *arguments]
    package = {"PYTHONPATH": str(ROOT / "python")}
    return cluster.start(
        host, command, package, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def said(cluster: EmulatedCluster, *arguments: str) -> tuple[int, str]:
    process = doctor(cluster, 1, *arguments)
    text, _ = process.communicate(timeout=AMPLE_SECONDS)
    return process.returncode, text


@pytest.mark.skipif(unsupported() is not None, reason=unsupported() or "")
def test_two_hosts() -> None:
    with EmulatedCluster(LINKS["lan"], 2) as cluster:
        listener = doctor(cluster, 0, "--listen")
        assert listener.stdout is not None
        assert listener.stdout.readline().startswith("host0 listens at port 29400, until Ctrl-C.")
        status, text = said(cluster, "--peer", "host0")
        assert status == 0, text
        for line in (
            "ok       name of this host: host1 is 10.77.1.1",
            "ok       name host0: it is 10.77.0.1",
            "ok       device: net0 (10.77.1.1) leads there",
            "ok       port 29400 there: a doctor answers at 10.77.0.1",
            "ok       any port, from host0 to here: open",
            "ok       any port, from here to host0: open",
            "ok       host0, name of this host: host0 is 10.77.0.1",
        ):
            assert line in text.splitlines(), text
        assert listener.stdout.readline() == "10.77.1.1 has its answers\n"
        status, text = said(cluster, "--peer", "host0:29401")
        assert status == 1
        assert "FAILED   port 29401 there: the host is there, and nobody listens; start" in text
        status, text = said(cluster, "--peer", "host7")
        assert status == 1 and "FAILED   name host7: no host has this name here" in text
        cluster.relay.cut(0, 1)
        status, text = said(cluster, "--peer", "host0")
        assert status == 1
        assert "FAILED   port 29400 there: no answer in 5 s: a firewall drops what comes" in text
