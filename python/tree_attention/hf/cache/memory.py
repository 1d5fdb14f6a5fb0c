# SPDX-License-Identifier: BSD-3-Clause
"""The error of a cache that finds no memory, and how much memory there is."""

import math
import os
import resource
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

# The least that is compared with the memory that is free, which takes tens of microseconds: what is
# smaller is left to the allocator.
_LEAST_COMPARED = 64 << 20
_SCALE_BYTES = 4  # of keys of 8 bits, for each token and head


class Need(NamedTuple):
    """Buffers that a layer is about to allocate."""

    buffers: Mapping[str, Tensor]  # of the layer now; the new ones differ in the number of slots
    batch: int
    capacity: int  # in slots of a sequence
    num_layers: int  # that will allocate as much
    max_length: int | None  # of a cache of fixed size, on all ranks together
    world_size: int

    @property
    def token_bytes(self) -> int:
        """The bytes that one token of a sequence takes in all these layers."""
        rows = (x.itemsize * x.shape[1] * math.prod(x.shape[3:]) for x in self.buffers.values())
        return self.num_layers * sum(rows)

    @property
    def num_bytes(self) -> int:
        return self.batch * self.capacity * self.token_bytes

    @property
    def device(self) -> torch.device:
        return self.buffers["keys"].device

    def check(self) -> None:
        """Raises torch.OutOfMemoryError where the device certainly has no room."""
        if self.num_bytes >= _LEAST_COMPARED:
            free = free_bytes(self.device)
            if free is not None and free < self.num_bytes:
                raise self.error(free)

    def error(self, free: int | None = None) -> torch.OutOfMemoryError:
        free = free_bytes(self.device) if free is None else free
        there = "" if free is None else f", and {in_words(free)} are free"
        layers = f"{self.num_layers} layer{'s' * (self.num_layers > 1)}"
        each = f"{self.token_bytes:,} bytes each in {layers}"
        if self.batch > 1:
            each += f", {self.batch} sequences"
        ways = ["fewer tokens" if self.max_length is None else "a smaller max_length"]
        keys = self.buffers["keys"]
        if keys.dtype.is_floating_point and keys.itemsize > 1:
            heads = keys.shape[1]
            in_8_bits = self.token_bytes // keys.itemsize
            in_8_bits += self.num_layers * heads * _SCALE_BYTES * len(self.buffers)
            ways.append(f"kv_dtype='int8' ({in_8_bits:,} bytes each)")
        elif self.batch > 1:
            ways.append("fewer sequences")
        ways.append(f"more ranks than {self.world_size}, each of which holds its share")
        whole = "" if self.max_length is None else f" of max_length {self.max_length:,}"
        return torch.OutOfMemoryError(
            f"TreeCache: {self.capacity:,} tokens{whole} on this rank need "
            f"{in_words(self.num_bytes)} of {self.device} ({each}){there}; take "
            f"{', '.join(ways[:-1])}, or {ways[-1]}"
        )


def is_out_of_memory(error: RuntimeError) -> bool:
    """True for what torch's allocators raise. Allocators of the host's memory have no class for it:
    of the two texts, the second is page-locked memory's."""
    says = "can't allocate memory", "CUDA error: out of memory"
    return isinstance(error, torch.OutOfMemoryError) or any(x in str(error) for x in says)


def free_bytes(device: torch.device) -> int | None:
    """The bytes that a process can still allocate on a device, or None where nobody knows."""
    if device.type == "cuda" and torch.cuda.is_available():
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type != "cpu":
        return None
    found: list[int] = []
    with suppress(OSError, ValueError, KeyError):
        lines = dict(x.split(":") for x in Path("/proc/meminfo").read_text().splitlines())
        found.append(sum(int(lines[x].split()[0]) << 10 for x in ("MemAvailable", "SwapFree")))
    with suppress(OSError, ValueError, IndexError):
        pages = Path("/proc/self/statm").read_text().split()
        # The first limit counts the pages of all mappings, the second the pages of data and stacks.
        for limit, used in ((resource.RLIMIT_AS, pages[0]), (resource.RLIMIT_DATA, pages[5])):
            most, _ = resource.getrlimit(limit)
            if most != resource.RLIM_INFINITY:
                found.append(max(0, most - int(used) * os.sysconf("SC_PAGE_SIZE")))
    with suppress(OSError, ValueError, KeyError):
        found += _left_in_groups(Path("/proc/self/cgroup").read_text(), Path("/sys/fs/cgroup"))
    return min(found, default=None)


def _left_in_groups(memberships: str, root: Path) -> list[int]:
    """The bytes that the memory limits of a process's control groups leave, as in a container: of
    its group in version 2 of cgroups, and of each group that this one is in."""
    (own,) = (line[3:] for line in memberships.splitlines() if line.startswith("0::"))
    group, found = root / own.lstrip("/"), list[int]()
    while group.is_relative_to(root):
        limit = group / "memory.max"  # which the root of the system has not
        if limit.exists() and (most := limit.read_text().strip()) != "max":
            pages = dict(x.split() for x in (group / "memory.stat").read_text().splitlines())
            # Pages of files that were not used lately are given up for others.
            used = int((group / "memory.current").read_text()) - int(pages["inactive_file"])
            found.append(max(0, int(most) - used))
        group = group.parent
    return found


def in_words(num_bytes: float) -> str:
    """A size in the largest unit that it reaches."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB")):
        if round(num_bytes / unit, 1) >= 1:
            return f"{num_bytes / unit:,.1f} {name}"
    return f"{num_bytes / 1024:,.1f} KiB"
