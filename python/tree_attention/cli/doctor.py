# SPDX-License-Identifier: BSD-3-Clause
"""`tree-attention doctor`: this host, and the way to another one, before a job of both.

A launcher says little about a wrong name, a wrong port or a firewall, and takes minutes. Here each
step has a deadline of seconds, and each line says what to do.
"""

import importlib.metadata
import io
import ipaddress
import json
import os
import platform
import resource
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, TypeVar

from .. import _loader, _memory
from .._network import address_towards, device_of
from .usage import UsageError, argument_parser, plain_console, printable, program

PORT = 29400  # where the pages let torchrun meet
# For an answer of a name server, and for a connection.
ANSWER_SECONDS = 5.0
# In which the other side imports torch, and tries its connection.
NOTE_SECONDS = 120.0
MAX_BYTES = 1 << 16  # of a message
_GREETING = "tree-attention doctor"
_NUM_PINGS = 5
# Below these a line asks for more.
_FEWEST_FILES, _LEAST_MEMORY, _LEAST_SHARED = 1024, 1 << 30, 64 << 20
_CLOCK_SECONDS = 1.0
_ALLOW = "allow all TCP ports between the hosts of a job, as ranks listen at any free one"
_OK, _WARNING, _FAILED = "ok", "warning", "FAILED"

T = TypeVar("T")


@dataclass(frozen=True)
class Finding:
    """A line of the output: a state, what was checked, what was found, and what to do about it."""

    result: str
    name: str
    detail: str
    advice: str = ""

    def __str__(self) -> str:
        advice = f"; {self.advice}" if self.advice else ""
        return printable(f"{self.result:<8} {self.name}: {self.detail}{advice}")


class Unreachable(Exception):
    """No further step can be taken."""


def main(arguments: list[str]) -> int:
    parser = argument_parser(
        "doctor",
        "Checks this host, and with --peer the way to another host, on which doctor --listen "
        "runs: names, network device, ports in both directions, versions, clocks and limits. Each "
        "check takes seconds at most. The exit status is 1 if something is in the way of a job.",
        "doctor --listen            (on host0)",
        "doctor --peer host0        (on each of the others)",
    )
    side = parser.add_mutually_exclusive_group()
    side.add_argument(
        "--peer",
        metavar="HOST[:PORT]",
        help="Another host, and the port at which its `doctor --listen` answers "
        f"(default: {PORT}).",
    )
    side.add_argument(
        "--listen",
        type=int,
        nargs="?",
        const=PORT,
        metavar="PORT",
        help=f"Answer the other hosts at this port until Ctrl-C (default: {PORT}).",
    )
    parsed = parser.parse_args(arguments)
    if parsed.listen is not None:
        return listen(parsed.listen)
    place = None if parsed.peer is None else place_of(parsed.peer)
    findings = []
    for finding in [*of_this_host()] if place is None else with_peer(*place):
        findings.append(finding)
        plain_console().print(str(finding), style="red" if finding.result == _FAILED else None)
    plain_console().print(summary(findings))
    return int(any(finding.result == _FAILED for finding in findings))


def summary(findings: Sequence[Finding]) -> str:
    counts = [(sum(x.result == kind for x in findings), kind) for kind in (_OK, _WARNING, _FAILED)]
    return ", ".join(f"{count} {kind}" for count, kind in counts if count)


def place_of(text: str) -> tuple[str, int]:
    """The host and the port of HOST, HOST:PORT or [ADDRESS]:PORT."""
    host, port = text, str(PORT)
    if text.startswith("["):
        host, _, port = text[1:].partition("]")
        port = port.removeprefix(":") or str(PORT)
    elif text.count(":") == 1:
        host, _, port = text.partition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise UsageError(f"--peer must be HOST or HOST:PORT, with a port up to 65535, got {text!r}")
    return host, int(port)


def of_this_host() -> Iterator[Finding]:
    """The lines that need no other host."""
    name = socket.gethostname()
    device = os.environ.get("GLOO_SOCKET_IFNAME")
    names = "name of this host"
    to_do = (
        "over several hosts Gloo takes this address: give the name one that the others reach in "
        "/etc/hosts, or export GLOO_SOCKET_IFNAME=DEVICE"
    )
    try:
        addresses = resolved(name)
        is_reached = not any(map(is_loopback, addresses))
        detail = f"{name} is {', '.join(addresses)}"
    except Unreachable as error:
        is_reached, detail = False, f"{name}: {error}"
    if is_reached:
        yield Finding(_OK, names, detail)
    elif device:
        yield Finding(_OK, names, f"{detail}, and GLOO_SOCKET_IFNAME names {device} in its place")
    else:
        yield Finding(_WARNING, names, detail, to_do)
    if device and device not in (known := [name for _, name in socket.if_nameindex()]):
        detail = f"GLOO_SOCKET_IFNAME is {device}, and the devices are {', '.join(known)}"
        yield Finding(_FAILED, "device of Gloo", detail, "export the name of one of them")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft != resource.RLIM_INFINITY and soft < _FEWEST_FILES
    more = f"each rank has a connection to each other: ulimit -n {max(soft, min(hard, 65536))}"
    shown = "any number" if soft == resource.RLIM_INFINITY else f"{soft:,}"
    yield Finding(_WARNING if few else _OK, "open files", shown, more * few)
    yield from of_memory()


def of_memory(meminfo: Path = Path("/proc/meminfo"), shared: str = "/dev/shm") -> Iterator[Finding]:
    with suppress(OSError, ValueError, IndexError):
        lines = dict(line.split(":") for line in meminfo.read_text().splitlines())
        free, whole = (int(lines[x].split()[0]) << 10 for x in ("MemAvailable", "MemTotal"))
        few = free < _LEAST_MEMORY
        detail = f"{free / 2**30:.1f} of {whole / 2**30:.1f} GiB are free"
        yield Finding(_WARNING if few else _OK, "memory", detail, "end other programs" * few)
    for left in _memory.left_in_groups():
        few = left < _LEAST_MEMORY
        detail = f"{left / 2**30:.1f} GiB are left by a control group, as of a container"
        more = "raise it: docker run --memory, or MemoryMax= of systemd"
        yield Finding(_WARNING if few else _OK, "limit of memory", detail, more * few)
    for name, limit in (("-v", resource.RLIMIT_AS), ("-d", resource.RLIMIT_DATA)):
        soft, _ = resource.getrlimit(limit)
        if soft != resource.RLIM_INFINITY:
            detail = f"a process may have {soft / 2**30:.1f} GiB (ulimit {name})"
            yield Finding(_WARNING, "limit of memory", detail, f"ulimit {name} unlimited")
    try:
        usage = shutil.disk_usage(shared)
    except OSError as error:
        yield Finding(_WARNING, shared, error.strerror or str(error), "mount a tmpfs there")
        return
    few = usage.free <= _LEAST_SHARED
    detail = f"{usage.free / 2**20:,.0f} of {usage.total / 2**20:,.0f} MiB are free"
    more = "torch and vLLM share memory there: docker run --shm-size 1g, or --ipc host"
    yield Finding(_WARNING if few else _OK, shared, detail, more * few)


def note_of_this_host(port: int) -> dict[str, Any]:
    """The answer to the other side; `port` is a free one at which this side listens."""
    try:
        instruction_set = str(_loader.load().cpu_instruction_set())
    except ImportError as error:  # no torch, or the extension is not built
        instruction_set = f"unknown: {error}"
    versions = {"tree_attention": _loader.__version__, "python": platform.python_version()}
    for package in ("torch", "transformers"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "greeting": _GREETING,
        "host": socket.gethostname(),
        "port": port,
        "versions": versions,
        "instruction set": instruction_set,
        "findings": [astuple(finding) for finding in of_this_host()],
    }


def with_peer(host: str, port: int) -> Iterator[Finding]:
    """All lines for a pair of hosts, up to the first step that fails."""
    yield from of_this_host()
    try:
        yield from of_the_way(host, port)
    except Unreachable:
        return


def of_the_way(host: str, port: int) -> Iterator[Finding]:
    """The lines about another host; Unreachable after the line that says why it ends."""
    step = f"name {host}"
    try:
        addresses = resolved(host)
    except Unreachable as error:
        known = "give its address, or a line in /etc/hosts; `getent hosts` must print it"
        yield Finding(_FAILED, step, str(error), known)
        raise
    detail = f"it is {', '.join(addresses)}"
    loops = any(map(is_loopback, addresses))
    if loops and host != "localhost" and host not in addresses:
        real = "/etc/hosts here must give it the address that other hosts reach"
        yield Finding(_FAILED, step, f"{detail}, which leads to this host itself", real)
        raise Unreachable(detail)  # the device and the ports would be this host's
    own, lost = "", ""
    try:
        own = address_towards(host, port)
    except OSError as error:
        lost = f"no device leads there: {error.strerror}"
    if loops or own in addresses:
        yield Finding(_WARNING, step, f"{detail}, this host itself", "name another host")
    else:
        yield Finding(_OK, step, detail)
    if lost:
        yield Finding(_FAILED, "device", lost, f"`ip route get {addresses[0]}` shows the way")
        raise Unreachable(lost)
    device = device_of(own) or "unknown"
    named = f"on this host, export GLOO_SOCKET_IFNAME={device}"
    detail = f"{device} ({own}) leads there"
    yield Finding(_OK, "device", detail, named * (device != os.environ.get("GLOO_SOCKET_IFNAME")))
    step = f"port {port} there"
    start = f"start `{program()} doctor --listen {port}` there"
    try:
        connection = socket.create_connection((host, port), ANSWER_SECONDS)
    except OSError as error:
        yield Finding(_FAILED, step, *why_not(error, start))
        raise Unreachable from error
    with connection, socket.create_server((own, 0), family=connection.family) as server:
        messages = connection.makefile("rwb")
        try:
            connection.settimeout(ANSWER_SECONDS)
            send(messages, {"greeting": _GREETING})
            if receive(messages).get("greeting") != _GREETING:
                raise ValueError("it is another program's")
        except (OSError, ValueError) as error:
            taken = f"somebody listens there who is no doctor: {why(error)}"
            another = f"`{program()} doctor --listen PORT` there, and --peer {host}:PORT here"
            yield Finding(
                _FAILED, step, taken, f"end that program, or take another port: {another}"
            )
            raise Unreachable from error
        yield Finding(_OK, step, f"a doctor answers at {connection.getpeername()[0]}")
        try:
            yield from of_the_answers(connection, messages, server)
        except (OSError, ValueError, KeyError, TypeError) as error:
            lost = f"it went away or says what no doctor does: {why(error)}"
            yield Finding(_FAILED, host, lost, f"see its output, and {start} again")
            raise Unreachable from error


def of_the_answers(
    connection: socket.socket, messages: io.BufferedRWPair, server: socket.socket
) -> Iterator[Finding]:
    """The answers of another host's doctor, and the connections that both try."""
    rounds, offset = [], 0.0
    for _ in range(_NUM_PINGS):
        begin = time.time()
        send(messages, {})
        there = float(receive(messages)["time"])
        end = time.time()
        rounds.append(end - begin)
        if rounds[-1] == min(rounds):
            offset = there - (begin + end) / 2
    quick = f"{1e3 * min(rounds):.2f} ms there and back"
    yield Finding(_OK, "time of a message", quick)
    late = abs(offset) > _CLOCK_SECONDS + min(rounds)
    alike = "times in the logs of both do not agree: let chrony or ntpd set the clocks"
    shown = f"{abs(offset):.1f} s apart" if late else f"less than {_CLOCK_SECONDS:g} s apart"
    yield Finding(_WARNING if late else _OK, "clocks", shown, alike * late)
    connection.settimeout(NOTE_SECONDS)
    mine = note_of_this_host(server.getsockname()[1])
    send(messages, mine)
    theirs = receive(messages)
    name, ports = str(theirs["host"]), "any port"
    step = f"{ports}, from {name} to here"
    if reason := str(theirs["back"]):
        here = connection.getsockname()[0]
        blocked = f"{name} cannot connect to {here}: {reason}"
        yield Finding(_FAILED, step, blocked, _ALLOW)
    else:
        yield Finding(_OK, step, "open")
    step = f"{ports}, from here to {name}"
    try:
        place = connection.getpeername()[0], port_of(theirs)
        socket.create_connection(place, ANSWER_SECONDS).close()
        yield Finding(_OK, step, "open")
    except OSError as error:
        yield Finding(_FAILED, step, *why_not(error, _ALLOW))
    yield from of_both(mine, theirs)
    for result, what, detail, advice in theirs["findings"]:
        yield Finding(str(result), f"{name}, {what}", str(detail), str(advice))


def of_both(mine: dict[str, Any], theirs: dict[str, Any]) -> Iterator[Finding]:
    """The things that two hosts should have in common."""
    same = "install the same on both"
    for package, version in mine["versions"].items():
        other = dict(theirs["versions"]).get(package, "not told")
        if version == other:
            yield Finding(_OK, package, f"{version} on both")
            continue
        refused = package in ("tree_attention", "torch")
        differ = f"{version} here, {other} there"
        yield Finding(_FAILED if refused else _WARNING, package, differ, same)
    sets = [str(note["instruction set"]) for note in (mine, theirs)]
    if any(x.startswith("unknown") for x in sets):
        yield Finding(_FAILED, "extension", "; ".join(sets), "build it where it is missing")
    elif sets[0] == sets[1]:
        yield Finding(_OK, "instruction set", f"{sets[0]} on both")
    else:
        rounding = "they round differently: hf.enable(model, synchronize_logits=True)"
        differ = f"{sets[0]} here, {sets[1]} there"
        yield Finding(_WARNING, "instruction set", differ, rounding)


def listen(port: int) -> int:
    """Answers doctors of other hosts until Ctrl-C."""
    if not 0 <= port < 1 << 16:
        raise UsageError(f"--listen must be a port, 0 to 65535, got {port}")
    try:
        server = listener(port)
    except OSError as error:
        raise UsageError(f"--listen {port}: {why(error)}; give another port") from error
    port = server.getsockname()[1]
    name, say = socket.gethostname(), plain_console().print

    def serve(connection: socket.socket, other: str) -> None:
        with connection:
            try:
                answer(connection)
                say(f"{other} has its answers")
            except (OSError, ValueError, KeyError, TypeError) as error:
                say(printable(f"{other} has gone, or is no doctor: {why(error)}"))
        sys.stdout.flush()

    with server:
        there = f"{program()} doctor --peer {name}:{port}"
        say(printable(f"{name} listens at port {port}, until Ctrl-C. On another host: {there}"))
        sys.stdout.flush()
        try:
            while True:
                connection, place = server.accept()
                other = place[0].removeprefix("::ffff:")
                # One that says nothing must not keep the others waiting.
                threading.Thread(
                    target=serve, args=(connection, other), name="doctor", daemon=True
                ).start()
        except KeyboardInterrupt:
            return 0


def listener(port: int) -> socket.socket:
    """A server for every address of this host."""
    if socket.has_dualstack_ipv6():
        with suppress(OSError):  # where a host has it, and no address
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def answer(connection: socket.socket) -> None:
    """Answers one doctor, in bounded time, and connects to no other host."""
    connection.settimeout(NOTE_SECONDS)
    messages = connection.makefile("rwb")
    if receive(messages).get("greeting") != _GREETING:
        raise ValueError("it is no doctor")
    send(messages, {"greeting": _GREETING})
    for _ in range(_NUM_PINGS):
        receive(messages)
        send(messages, {"time": time.time()})
    asked = receive(messages)
    with listener(0) as server:
        note = note_of_this_host(server.getsockname()[1])
        place = connection.getpeername()[0], port_of(asked)
        reason = ""
        try:
            # The other side's system takes it, as that side listens.
            socket.create_connection(place, ANSWER_SECONDS).close()
        except OSError as error:
            reason = why(error)
        send(messages, {**note, "back": reason})
        receive(messages, may_end=True)  # until it has tried the port


def send(messages: io.BufferedRWPair, message: dict[str, Any]) -> None:
    messages.write(json.dumps(message).encode() + b"\n")
    messages.flush()


def receive(messages: io.BufferedRWPair, may_end: bool = False) -> dict[str, Any]:
    """Return the next message, once it is read as JSON; with `may_end` nothing at the end of the
    stream, which is else an error."""
    line = messages.readline(MAX_BYTES)
    if not line and may_end:
        return {}
    if not line.endswith(b"\n"):
        raise ValueError("its answer is cut off" if line else "it says nothing")
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError(f"its answer is {line[:40]!r}") from None
    if not isinstance(message, dict):
        raise ValueError(f"its answer is {line[:40]!r}")
    return message


def port_of(note: dict[str, Any]) -> int:
    port = int(note["port"])
    if not 0 < port < 1 << 16:
        raise ValueError(f"its port is {port}")
    return port


def resolved(host: str) -> list[str]:
    """The addresses of a name, or Unreachable with the reason."""

    def ask() -> list[str]:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(str(place[0]) for *_, place in found))

    try:
        return within(ANSWER_SECONDS, ask)
    except TimeoutError:
        raise Unreachable(f"no name server answers in {ANSWER_SECONDS:g} s") from None
    except (OSError, UnicodeError) as error:
        raise Unreachable(f"no host has this name here ({why(error)})") from None


def within(seconds: float, ask: Callable[[], T]) -> T:
    """The result of a call that knows no deadline, or TimeoutError."""
    results: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(ask())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="tree_attention doctor", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError
    return results[0]


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def why(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    number = getattr(error, "errno", None)
    if number is not None and number > 0:  # errors of names have numbers below 0
        return os.strerror(number)
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def why_not(error: OSError, start: str) -> tuple[str, str]:
    """The reason of a connection that could not be made, and what to do."""
    if isinstance(error, ConnectionRefusedError):
        return "the host is there, and nobody listens", f"{start}, and check the port"
    if isinstance(error, TimeoutError):
        dropped = f"no answer in {ANSWER_SECONDS:g} s: a firewall drops what comes, or the host is"
        return f"{dropped} down", f"{_ALLOW}, and {start}" if start != _ALLOW else _ALLOW
    return why(error), f"check address and firewall, and {start}"
