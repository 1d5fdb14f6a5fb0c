# SPDX-License-Identifier: BSD-3-Clause
"""Network namespaces, their devices and their names; made, and removed whatever happens."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from .relay import MTU, Relay
from .wiring import MAX_NODES, LinkSpec, Wiring

_NAMESPACES = Path("/run/netns")
_ETC = Path("/etc/netns")  # `ip netns exec` puts the files of a namespace in place of /etc's
_NAME = re.compile(r"treeattn-(\d+)-(\d+)-(\d+)")
# tbf lets so much pass at once; less than a packet never passes, and timers are this precise.
_TIMER_SECONDS = 100e-6
_QUEUE_BYTES = 32 << 20  # long enough that TCP's windows fill before it does
_SETTINGS = {
    "net/ipv6/conf/all/disable_ipv6": "1",
    # The same everywhere, whatever the host prefers: the one that every kernel lets namespaces use.
    # And no slow start after a pause, or a step would measure how long ago the last one was.
    "net/ipv4/tcp_congestion_control": "reno",
    "net/ipv4/tcp_slow_start_after_idle": "0",
}


class Unsupported(RuntimeError):
    """This system cannot emulate a network."""


def unsupported() -> str | None:
    """Why not, in words for the user; None if it can."""
    if sys.platform != "linux":
        return "emulated clusters need Linux: they are made of network namespaces"
    if os.geteuid() != 0:
        return "emulated clusters need root, to make network namespaces and TUN devices"
    compiler = os.environ.get("CXX", "g++")
    for program, package in (
        *(("ip", "iproute2"), ("tc", "iproute2")),
        *(("unshare", "util-linux"), (compiler, "g++")),
    ):
        if shutil.which(program) is None:
            return f"emulated clusters need the program {program} (Debian: apt install {package})"
    try:
        os.close(os.open("/dev/net/tun", os.O_RDWR))
    except OSError as error:
        return f"emulated clusters need TUN devices: /dev/net/tun: {error.strerror}"
    name = f"treeattn-{_owner()}-999"
    try:
        _run("ip", "netns", "add", name)
        _run("ip", "-n", name, "tuntap", "add", "dev", "net0", "mode", "tun")
        _run("tc", "-n", name, *_shaping("net0", LinkSpec(1e-3, 1e9)))
    except Unsupported as error:
        return str(error)
    finally:
        _remove(name)
    return None


class EmulatedNetwork:
    """Hosts 0, 1, ... in nodes, connected as `wiring` says."""

    def __init__(self, wiring: Wiring, num_hosts: int) -> None:
        """
        Raises:
            ValueError: more nodes than there are addresses, or none.
            Unsupported: the system refuses.
        """
        if not 1 <= num_hosts <= MAX_NODES * wiring.per_node:
            limit = MAX_NODES * wiring.per_node
            raise ValueError(f"a cluster has 1 to {limit} hosts here, got {num_hosts}")
        remove_orphans()
        self.wiring = wiring
        self.names = [f"treeattn-{_owner()}-{host}" for host in range(num_hosts)]
        try:
            for name in self.names:
                _run("ip", "netns", "add", name)
            self.relay = Relay(wiring, [_NAMESPACES / name for name in self.names])
            for host, name in enumerate(self.names):
                self._configure(host, name)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends what still runs on the hosts and removes them."""
        if hasattr(self, "relay"):
            self.relay.close()
        for name in self.names:
            _remove(name)

    def _configure(self, host: int, name: str) -> None:
        wiring, address = self.wiring, self.wiring.address(host)
        devices = {"net0": wiring.between}
        if wiring.inside is not None:
            devices["node0"] = wiring.inside
        routes = {"net0": "10.77.0.0/16", "node0": f"10.77.{wiring.node(host)}.0/24"}
        commands = ["link set lo up"]
        for device in devices:
            # A queue for what arrives while the relay waits for a processor.
            commands.append(f"link set {device} mtu {MTU} txqueuelen 10000 up")
        commands.append(f"address add {address}/32 dev net0")
        commands += [f"route add {routes[device]} dev {device} src {address}" for device in devices]
        _run("ip", "-n", name, "-batch", "-", text="\n".join(commands))
        for device, link in devices.items():
            _run("tc", "-n", name, *_shaping(device, link))
        settings = [f"echo {value} >/proc/sys/{file}" for file, value in _SETTINGS.items()]
        _run("ip", "netns", "exec", name, "sh", "-ec", "\n".join(settings))
        folder = _ETC / name
        folder.mkdir(parents=True, exist_ok=True)
        hosts = [f"{wiring.address(i)} {host_name(i)}" for i in range(len(self.names))]
        (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *hosts]) + "\n")


def host_name(host: int) -> str:
    return f"host{host}"


def remove_orphans() -> None:
    """Removes the hosts of processes that are no more: they were killed, or the machine was."""
    found = {path.name for folder in (_NAMESPACES, _ETC) for path in folder.glob("treeattn-*")}
    for name in found:
        match = _NAME.fullmatch(name)
        if match is not None and _start_time(int(match[1])) != int(match[2]):
            _remove(name)


def _owner() -> str:
    """This process, by number and birth, as numbers are used again."""
    return f"{os.getpid()}-{_start_time(os.getpid())}"


def _start_time(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[19])


def _shaping(device: str, link: LinkSpec) -> list[str]:
    burst = max(MTU + 14, int(link.rate / 8 * _TIMER_SECONDS))
    shape = f"rate {int(link.rate)}bit burst {burst} limit {_QUEUE_BYTES}"
    return f"qdisc add dev {device} root tbf {shape}".split()


def _remove(name: str) -> None:
    """A namespace that `_owner` or one before it named, and the processes in it."""
    for _ in range(20):
        done = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
        pids = done.stdout.split()
        if not pids:
            break
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.05)
    subprocess.run(["ip", "netns", "delete", name], capture_output=True)
    shutil.rmtree(_ETC / name, ignore_errors=True)
    with contextlib.suppress(OSError):
        _ETC.rmdir()  # if nobody else has files there


def _run(*command: str, text: str | None = None) -> None:
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode:
        raise Unsupported(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
