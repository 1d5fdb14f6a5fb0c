# SPDX-License-Identifier: BSD-3-Clause
"""The emulated cluster: what needs no root, then hosts, links and what is left of them."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from lab.emulation import (
    LINKS,
    EmulatedCluster,
    LinkSpec,
    Wiring,
    network,
    parse_link,
    unsupported,
)
from lab.emulation.__main__ import main, wiring_of
from lab.emulation.probe import probe, spread
from lab.emulation.relay import compile_program

ROOT = Path(__file__).parents[3]
NAMESPACES = Path("/run/netns")
LEVELS = Wiring(LinkSpec(0.02, 1e9), LinkSpec(0.004, 1e9), per_node=2)


def test_links() -> None:
    assert parse_link("1ms,1gbit") == LinkSpec(1e-3, 1e9)
    assert parse_link("100us,2.5gbit") == LinkSpec(pytest.approx(1e-4), 2.5e9)
    assert parse_link(".5s,300kbit") == LinkSpec(0.5, 3e5)
    assert str(LINKS["lan"]) == "0.1 ms, 10 Gb/s"
    assert str(LINKS["two-level"]) == "0.1 ms, 10 Gb/s in nodes of 4, 1 ms, 1 Gb/s between them"


@pytest.mark.parametrize("text", ["", "1ms", "1ms,1gb", "-1ms,1gbit", "1ms,1gbit ", "ms,1gbit"])
def test_no_links(text: str) -> None:
    with pytest.raises(ValueError, match=r"a link is written DELAY\(us\|ms\|s\),RATE"):
        parse_link(text)


def test_links_have_a_least_rate() -> None:
    with pytest.raises(ValueError, match="a link has at least 100 kbit/s"):
        parse_link("1ms,1kbit")


def test_wiring_knows_nodes_addresses_and_links() -> None:
    wiring = LINKS["two-level"]
    assert [wiring.node(host) for host in range(6)] == [0, 0, 0, 0, 1, 1]
    assert wiring.address(0) == "10.77.0.1" and wiring.address(5) == "10.77.1.2"
    assert wiring.link(0, 3) == wiring.inside and wiring.link(3, 4) == wiring.between
    flat = LINKS["lan"]
    assert flat.link(0, 1) == flat.between and flat.address(7) == "10.77.7.1"


def test_wiring_refuses() -> None:
    link = LinkSpec(1e-3, 1e9)
    with pytest.raises(ValueError, match="a node has 1 to 254 hosts, got 300"):
        Wiring(link, link, 300)
    for wiring in (lambda: Wiring(link, None, 2), lambda: Wiring(link, link, 1)):
        with pytest.raises(ValueError, match="nodes of several hosts, and only those, need a link"):
            wiring()


def test_options_give_a_wiring() -> None:
    assert wiring_of("metro", None, None) is LINKS["metro"]
    assert wiring_of("2ms,1gbit", None, None) == Wiring(LinkSpec(2e-3, 1e9))
    assert wiring_of("2ms,1gbit", "1ms,1gbit", 3) == Wiring(
        LinkSpec(2e-3, 1e9), LinkSpec(1e-3, 1e9), 3
    )
    with pytest.raises(ValueError, match="--near and --per-node belong together"):
        wiring_of("2ms,1gbit", None, 3)
    with pytest.raises(ValueError, match="--near and --per-node go with --link DELAY,RATE"):
        wiring_of("metro", "1ms,1gbit", 3)


def test_spread() -> None:
    assert spread(list(range(101))) == (10, 50, 90)


def test_needs_root(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main(["--hosts", "2"]) == 2
    assert "emulated clusters need root" in capsys.readouterr().err


def test_needs_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "emulated clusters need Linux" in str(unsupported())


@pytest.mark.skipif(sys.platform != "linux", reason="other systems are refused before")
def test_names_the_missing_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert unsupported() == "emulated clusters need the program ip (Debian: apt install iproute2)"


def test_wrong_options_end_with_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--link", "slow"])
    assert "a link is written" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="no C++ compiler")
def test_relay_logic() -> None:
    program = compile_program(ROOT / "tests/benchmarks/test_relay.cpp")
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@cache
def why_not() -> str | None:
    return unsupported()


@pytest.fixture
def root() -> None:
    if (why := why_not()) is not None:
        pytest.skip(why)


@pytest.fixture
def cluster(root: None) -> Iterator[EmulatedCluster]:
    """Hosts 0 and 1 in a node, host 2 in another."""
    with EmulatedCluster(LEVELS, 3) as made:
        yield made


def ours(pid: int) -> list[str]:
    return [path.name for path in NAMESPACES.glob(f"treeattn-{pid}-*")]


def test_packets_take_their_time(cluster: EmulatedCluster) -> None:
    # Only too early is wrong: a busy machine may be late.
    near, far = (probe(cluster, 0, host, round_trips=30, seconds=0.03) for host in (1, 2))
    assert near.expected_rtt == 0.008 and min(near.rtts) >= 0.008
    assert far.expected_rtt == 0.04 and min(far.rtts) >= 0.04
    # What tbf has saved up for the start of a transfer is a small part of it.
    assert max(far.rates) < 1.1e9 and max(near.rates) < 1.1e9
    assert str(far).startswith("host0 to host2: round trip 4")


def reaches(cluster: EmulatedCluster, a: int, b: int, seconds: float = 0.3) -> bool:
    ping = f"""
import socket
s = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
s.settimeout({seconds})
try:
    s.connect(("host{b}", 1))
except ConnectionRefusedError:
    pass  # it was there to refuse
"""
    command = [sys.executable, "-c", ping]
    return cluster.start(a, command, stderr=subprocess.DEVNULL).wait(240) == 0


def test_links_are_cut_and_mended(cluster: EmulatedCluster) -> None:
    assert reaches(cluster, 0, 2, seconds=10)
    cluster.relay.cut(0, 2)
    assert not reaches(cluster, 0, 2) and not reaches(cluster, 2, 0)
    assert reaches(cluster, 1, 2, seconds=10)
    cluster.relay.mend(0, 2)
    assert reaches(cluster, 0, 2, seconds=10)
    cluster.relay.lose(0, 2, 1.0)
    assert not reaches(cluster, 0, 2)
    with pytest.raises(ValueError, match="no such pair of hosts: cut 0 3"):
        cluster.relay.cut(0, 3)


def test_delays_change(cluster: EmulatedCluster) -> None:
    cluster.relay.delay(0, 1, 0.4)
    assert not reaches(cluster, 0, 1)  # within 0.3 s


def test_hosts_have_names_ranks_and_a_failure_of_one_is_a_failure(
    cluster: EmulatedCluster, capfd: pytest.CaptureFixture[str]
) -> None:
    said = 'echo $(hostname) $RANK of $WORLD_SIZE, $TREE_ATTENTION_NODE; exit "$RANK"'
    assert cluster.run(["sh", "-c", said], label=True) in (1, 2)
    lines = set(capfd.readouterr().out.splitlines())
    assert lines >= {
        "[host0] host0 0 of 3, node0",
        "[host1] host1 1 of 3, node0",
        "[host2] host2 2 of 3, node1",
    }


def test_refuses_too_many_hosts(root: None) -> None:
    with pytest.raises(ValueError, match="a cluster has 1 to 255 hosts here, got 256"):
        network.EmulatedNetwork(LINKS["lan"], 256)


def started(command: list[str]) -> tuple[subprocess.Popen[bytes], list[str]]:
    """A run of the tool, once all its hosts are busy."""
    tool = [sys.executable, "-m", "lab.emulation", "--hosts", "2", "--", *command]
    # A script in the background ignores SIGINT, and whatever it starts inherits that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(tool, cwd=ROOT, stdout=subprocess.PIPE)
    finally:
        signal.signal(signal.SIGINT, before)
    assert process.stdout is not None
    pids = [process.stdout.readline().decode().strip() for _ in range(2)]
    assert len(ours(process.pid)) == 2
    return process, pids


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_interrupted_runs_leave_nothing(root: None, sent: signal.Signals) -> None:
    process, pids = started(["sh", "-c", "echo $$; sleep 100"])
    process.send_signal(sent)
    assert process.wait(30) == 128 + sent
    assert not ours(process.pid) and not any(Path("/proc", pid).exists() for pid in pids)
    assert not list(Path("/etc/netns").glob(f"treeattn-{process.pid}-*"))


def test_the_next_run_clears_up_after_a_killed_one(root: None) -> None:
    process, pids = started(["sh", "-c", "echo $$; sleep 100"])
    process.kill()
    process.wait()
    deadline = time.monotonic() + 20  # the hosts' programs end by themselves, soon
    while any(Path("/proc", pid).exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(Path("/proc", pid).exists() for pid in pids)
    assert len(ours(process.pid)) == 2
    assert main(["--clean"]) == 0
    assert not ours(process.pid)


def test_does_not_touch_the_hosts_of_a_running_one(cluster: EmulatedCluster) -> None:
    network.remove_orphans()
    assert len(ours(os.getpid())) == 3
