# SPDX-License-Identifier: BSD-3-Clause
"""`tree-attention doctor`: what is in the way of a job of two hosts is a line that says what to do,
and costs seconds."""

import json
import re
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from distributed import AMPLE_SECONDS
from tree_attention import _memory, _network
from tree_attention.__main__ import main
from tree_attention.cli import doctor


@pytest.fixture(autouse=True)
def in_less_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "ANSWER_SECONDS", 1.0)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)


@pytest.fixture
def answered_by() -> Iterator[Callable[[Callable[[socket.socket], object]], int]]:
    """Starts a host that answers one connection; gives its port."""
    threads: list[threading.Thread] = []
    servers: list[socket.socket] = []

    def start(answer: Callable[[socket.socket], object]) -> int:
        server = doctor.listener(0)

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                answer(connection)

        servers.append(server)
        threads.append(threading.Thread(target=serve, daemon=True))
        threads[-1].start()
        port: int = server.getsockname()[1]
        return port

    yield start
    for thread in threads:
        thread.join(AMPLE_SECONDS)
        assert not thread.is_alive()
    for server in servers:
        server.close()


def lines_of(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """What was found, with its result, by what was looked at."""
    *lines, last = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"(\d+ (ok|warning|FAILED)(, |$))+", last)
    return {
        name: f"{line.split()[0]} {rest}"
        for line in lines
        for name, _, rest in [line[9:].partition(": ")]
    }


def test_two_hosts_that_are_alike(
    answered_by: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    port = answered_by(doctor.answer)
    assert main(["doctor", "--peer", f"127.0.0.1:{port}"]) == 0
    found, here = lines_of(capsys), socket.gethostname()
    assert found["name 127.0.0.1"].startswith("warning it is 127.0.0.1, this host itself; name")
    assert found["device"] == (
        "ok lo (127.0.0.1) leads there; on this host, export GLOO_SOCKET_IFNAME=lo"
    )
    assert found[f"port {port} there"] == "ok a doctor answers at 127.0.0.1"
    assert found[f"any port, from {here} to here"] == "ok open"
    assert found[f"any port, from here to {here}"] == "ok open"
    assert found["clocks"] == "ok less than 1 s apart"
    for same in ("tree_attention", "torch", "transformers", "python", "instruction set"):
        assert found[same].startswith("ok ") and found[same].endswith(" on both")
    for kind in ("open files", "memory", "/dev/shm"):
        assert kind in found and f"{here}, {kind}" in found  # of this one, and of the other


def test_a_name_that_nobody_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--peer", "no-such-host.invalid"]) == 1
    found = lines_of(capsys)["name no-such-host.invalid"]
    assert found.startswith("FAILED no host has this name here (")
    assert found.endswith(
        "; give its address, or a line in /etc/hosts; `getent hosts` must print it"
    )


def test_a_name_server_that_says_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "ANSWER_SECONDS", 0.1)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: threading.Event().wait(5.0))
    assert main(["doctor", "--peer", "host0"]) == 1
    assert lines_of(capsys)["name host0"].startswith("FAILED no name server answers in 0.1 s; give")


def as_in(hosts: dict[str, str]) -> Callable[..., Any]:
    """`getaddrinfo` with lines of /etc/hosts."""
    real = socket.getaddrinfo
    return lambda host, *rest, **named: real(hosts.get(host, host), *rest, **named)


def test_a_name_that_leads_back(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where Debian's installer has written /etc/hosts."""
    names = {"host0": "127.0.1.1", socket.gethostname(): "127.0.1.1"}
    monkeypatch.setattr(socket, "getaddrinfo", as_in(names))
    port = 29400
    assert main(["doctor", "--peer", f"host0:{port}"]) == 1
    found = lines_of(capsys)
    assert found["name host0"] == (
        "FAILED it is 127.0.1.1, which leads to this host itself; /etc/hosts here must give it the "
        "address that other hosts reach"
    )
    assert "device" not in found and f"port {port} there" not in found  # of this host
    own = found["name of this host"]
    assert own.startswith(f"warning {socket.gethostname()} is 127.0.1.1; over several hosts Gloo")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert main(["doctor"]) == 0
    assert lines_of(capsys)["name of this host"].startswith("ok ")


def test_a_name_of_this_host(
    answered_by: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its address is none of loopback, and all that a doctor of this host says would be ok."""
    port = answered_by(doctor.answer)
    monkeypatch.setattr(socket, "getaddrinfo", as_in({"host0": "127.0.0.1"}))
    monkeypatch.setattr(doctor, "is_loopback", lambda address: False)
    assert main(["doctor", "--peer", f"host0:{port}"]) == 0
    assert lines_of(capsys)["name host0"] == (
        "warning it is 127.0.0.1, this host itself; name another host"
    )


def test_a_device_that_is_not_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "net77")
    assert main(["doctor"]) == 1
    assert lines_of(capsys)["device of Gloo"].startswith("FAILED GLOO_SOCKET_IFNAME is net77, and")


def test_a_port_at_which_nobody_listens(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert main(["doctor", "--peer", f"127.0.0.1:{port}"]) == 1
    assert lines_of(capsys)[f"port {port} there"] == (
        "FAILED the host is there, and nobody listens; start `python -m tree_attention doctor "
        f"--listen {port}` there, and check the port"
    )


def test_packets_that_are_dropped(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def drop(place: object, seconds: float) -> socket.socket:
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", drop)
    assert main(["doctor", "--peer", "127.0.0.1"]) == 1
    found = lines_of(capsys)["port 29400 there"]
    assert found.startswith("FAILED no answer in 1 s: a firewall drops what comes, or the host is")
    assert "allow all TCP ports between the hosts of a job" in found


@pytest.mark.parametrize(
    ("says", "shown"),
    [
        (b"", "it says nothing"),
        (b"HTTP/1.1 400 Bad Request\r\n", "its answer is b'HTTP/1.1 400"),
        (b"{}\n", "it is another program's"),
        (b"[1]\n", "its answer is b'[1]"),
        (b'{"greeting": 3', "its answer is cut off"),
        (b"[" * 60000 + b"\n", "its answer is b'[[["),
        (b"x" * (1 << 17), "its answer is cut off"),
    ],
)
def test_another_program_at_the_port(
    says: bytes, shown: str, answered_by: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(connection: socket.socket) -> None:
        connection.recv(1000)
        connection.sendall(says)

    port = answered_by(answer)
    assert main(["doctor", "--peer", f"127.0.0.1:{port}"]) == 1
    found = lines_of(capsys)[f"port {port} there"]
    assert found.startswith(f"FAILED somebody listens there who is no doctor: {shown}"), found
    assert found.endswith("doctor --listen PORT` there, and --peer 127.0.0.1:PORT here"), found


@pytest.mark.deep
def test_somebody_who_takes_a_connection_and_is_silent(
    answered_by: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    port = answered_by(lambda connection: connection.recv(1000) and connection.recv(1000))
    assert main(["doctor", "--peer", f"127.0.0.1:{port}"]) == 1
    assert "no doctor: no answer in time" in lines_of(capsys)[f"port {port} there"]


def told(note: dict[str, Any]) -> Callable[[socket.socket], None]:
    """A doctor whose last answer is this one's, and `note`."""

    def answer(connection: socket.socket) -> None:
        messages = connection.makefile("rwb")
        for last in [{"greeting": doctor._GREETING}, *[{"time": 5.0}] * doctor._NUM_PINGS]:
            doctor.receive(messages)
            doctor.send(messages, last)
        doctor.receive(messages)
        doctor.send(messages, {**doctor.note_of_this_host(1), "back": "", **note})
        doctor.receive(messages, may_end=True)

    return answer


def test_a_firewall_between(answered_by: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The one port is open, as it is where somebody has allowed that alone."""
    port = answered_by(told({"host": "host0", "back": "no answer in time"}))
    assert main(["doctor", "--peer", f"127.0.0.1:{port}"]) == 1
    found = lines_of(capsys)
    allow = "allow all TCP ports between the hosts of a job, as ranks listen at any free one"
    back = f"FAILED host0 cannot connect to 127.0.0.1: no answer in time; {allow}"
    assert found["any port, from host0 to here"] == back
    there = f"FAILED the host is there, and nobody listens; {allow}"
    assert found["any port, from here to host0"].startswith(there)
    assert found["clocks"].startswith("warning ") and "let chrony or ntpd set" in found["clocks"]


@pytest.mark.parametrize(
    "note",
    [{"findings": 3}, {"findings": [[1]]}, {"port": "x"}, {"port": 1 << 20}, {"versions": 3}],
)
def test_answers_that_no_doctor_gives(
    note: dict[str, Any], answered_by: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    port = answered_by(told(note))
    assert main(["doctor", "--peer", f"127.0.0.1:{port}"]) == 1
    found = lines_of(capsys)["127.0.0.1"]
    assert found.startswith("FAILED it went away or says what no doctor does: ")


def test_hosts_that_differ() -> None:
    mine = {"versions": {"torch": "2.15", "python": "3.11"}, "instruction set": "AVX-512"}
    theirs = {"versions": {"torch": "2.14"}, "instruction set": "AVX2"}
    torch, python, instructions = map(str, doctor.of_both(mine, theirs))
    assert torch == "FAILED   torch: 2.15 here, 2.14 there; install the same on both"
    assert python == "warning  python: 3.11 here, not told there; install the same on both"
    assert instructions.startswith("warning  instruction set: AVX-512 here, AVX2 there; they round")
    *_, missing = doctor.of_both(mine, theirs | {"instruction set": "unknown: not built"})
    assert str(missing).startswith("FAILED   extension: AVX-512; unknown: not built; build it")


def test_limits_that_are_low(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = resource.getrlimit
    low = {resource.RLIMIT_NOFILE: (256, 4096), resource.RLIMIT_DATA: (1 << 30, 1 << 31)}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: low.get(kind) or real(kind))
    found = {finding.name: str(finding) for finding in doctor.of_this_host()}
    assert found["open files"].startswith("warning  open files: 256; each rank has a connection")
    assert found["open files"].endswith("ulimit -n 4096")
    assert "a process may have 1.0 GiB (ulimit -d); ulimit -d unlimited" in found["limit of memory"]
    file = tmp_path / "meminfo"
    file.write_text("MemTotal: 2048 kB\nMemAvailable: 1024 kB\n")
    memory, *_, shared = doctor.of_memory(file, str(tmp_path / "none"))
    assert str(memory) == "warning  memory: 0.0 of 0.0 GiB are free; end other programs"
    assert shared.advice == "mount a tmpfs there" and shared.result == "warning"
    monkeypatch.setattr(_memory, "left_in_groups", lambda: [3 << 30, 1 << 29])
    _, ample, few, *_ = map(str, doctor.of_memory(file))
    assert ample == (
        "ok       limit of memory: 3.0 GiB are left by a control group, as of a container"
    )
    assert few.startswith("warning  limit of memory: 0.5 GiB are left by") and "--memory" in few


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("host0", ("host0", 29400)),
        ("host0:5", ("host0", 5)),
        ("[::1]:5", ("::1", 5)),
        ("::1", ("::1", 29400)),
        ("[::1]", ("::1", 29400)),
    ],
)
def test_the_place_of_a_peer(text: str, place: tuple[str, int]) -> None:
    assert doctor.place_of(text) == place


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["--peer", "host0:"],
            "--peer must be HOST or HOST:PORT, with a port up to 65535, got 'ho",
        ),
        (["--peer", "host0:70000"], "--peer must be HOST or HOST:PORT, with a port up to"),
        (["--peer", ":5"], "--peer must be HOST or HOST:PORT"),
        (["--listen", "70000"], "--listen must be a port, 0 to 65535, got 70000"),
    ],
)
def test_wrong_arguments(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"doctor: {sentence}")


def test_a_port_in_use(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused before the seconds in which torch is imported."""
    monkeypatch.delattr(doctor, "note_of_this_host")
    with doctor.listener(0) as taken:
        port = taken.getsockname()[1]
        assert main(["doctor", "--listen", str(port)]) == 2
    said = f"doctor: --listen {port}: Address already in use; give another port\n"
    assert capsys.readouterr().err == said


def test_one_who_listens_goes_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Peers that send anything, and a silent one, do not end it. Ctrl-C does, without an error."""
    monkeypatch.setattr(doctor, "ANSWER_SECONDS", 60.0)
    server, said = doctor.listener(0), [b"", b"GET /\r\n", b"{}\n", b"x" * (1 << 17)]
    silent = socket.create_connection(("127.0.0.1", server.getsockname()[1]))
    port = server.getsockname()[1]
    accept, left = server.accept, list(said)

    class Server:
        def __enter__(self) -> "Server":
            return self

        def __exit__(self, *_: object) -> None:
            server.close()

        def getsockname(self) -> tuple[str, int]:
            return "", port

        def accept(self) -> Any:
            if silent not in clients:
                clients.append(silent)
                return accept()
            if not left:
                served = [thread for thread in threading.enumerate() if thread.name == "doctor"]
                for thread in served[1:]:  # the first is of the silent one
                    thread.join(60)
                raise KeyboardInterrupt
            client = socket.create_connection(("127.0.0.1", port))
            client.sendall(left.pop())
            client.shutdown(socket.SHUT_WR)
            clients.append(client)
            return accept()

    clients: list[socket.socket] = []
    monkeypatch.setattr(doctor, "listener", lambda _: Server())
    assert main(["doctor", "--listen", "0"]) == 0
    first, *others = capsys.readouterr().out.splitlines()
    here = socket.gethostname()
    assert first.endswith(f"On another host: python -m tree_attention doctor --peer {here}:{port}")
    assert len(others) == len(said)
    assert all(x.startswith("127.0.0.1 has gone, or is no doctor: ") for x in others)
    for client in clients:
        client.close()


def test_the_device_of_an_address() -> None:
    assert _network.device_of("127.0.0.1") == "lo"
    assert _network.device_of("192.0.2.1") is None
    assert _network.address_towards("127.0.0.1", 1) == "127.0.0.1"


def test_a_note_is_short_enough() -> None:
    assert len(json.dumps(doctor.note_of_this_host(1))) < doctor.MAX_BYTES / 4
