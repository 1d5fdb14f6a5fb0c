# SPDX-License-Identifier: BSD-3-Clause
"""Which address of this host, and which device, leads to another one."""

import fcntl
import ipaddress
import socket
import struct
from contextlib import suppress
from pathlib import Path

_SIOCGIFADDR = 0x8915  # of Linux


def address_towards(host: str, port: int) -> str:
    """The address of this host from which messages to `host` leave; sends none. OSError where the
    name is unknown, or no device leads there."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        found: str = probe.getsockname()[0]
    return found


def address_of(device: str) -> str:
    """The IPv4 address of a network device; OSError where it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", device.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24])


def device_of(address: str) -> str | None:
    """The network device that has this address; None where none has it."""
    wanted = ipaddress.ip_address(address.partition("%")[0])
    for _, name in socket.if_nameindex():
        if wanted in _addresses_of(name):
            return name
    return None


def _addresses_of(device: str) -> list[object]:
    found: list[object] = []
    with suppress(OSError):
        found.append(ipaddress.IPv4Address(address_of(device)))
    with suppress(OSError):  # where there is no IPv6
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            if name == device:
                found.append(ipaddress.IPv6Address(bytes.fromhex(digits)))
    return found
