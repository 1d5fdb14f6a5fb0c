# SPDX-License-Identifier: BSD-3-Clause
"""The memory that a process can still allocate."""

import os
import resource
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def is_out_of_memory(error: BaseException) -> bool:
    """True for what Python's and torch's allocators raise. torch's allocators of the host's memory
    have no class for it: of the two texts, the second is page-locked memory's."""
    torch = sys.modules.get("torch")
    if isinstance(error, ImportError):
        # The words of the loader of shared libraries, for a file system without execution, too.
        told = str(error)
        return "failed to map segment" in told and "Operation not permitted" not in told
    says = "can't allocate memory", "CUDA error: out of memory"
    if isinstance(error, MemoryError) or (torch and isinstance(error, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(x in str(error) for x in says)


def free_bytes(device: "torch.device") -> int | None:
    """The bytes that a process can still allocate on a device, or None where nobody knows."""
    if device.type == "cuda":
        from torch import cuda

        if cuda.is_available():
            free, _ = cuda.mem_get_info(device)
            return free + cuda.memory_reserved(device) - cuda.memory_allocated(device)
    if device.type != "cpu":
        return None
    shared = shared_bytes()
    found = [] if shared is None else [shared]
    with suppress(OSError, ValueError, IndexError):
        pages = Path("/proc/self/statm").read_text().split()
        # The first limit counts the pages of all mappings, the second the pages of data and stacks.
        for limit, used in ((resource.RLIMIT_AS, pages[0]), (resource.RLIMIT_DATA, pages[5])):
            most, _ = resource.getrlimit(limit)
            if most != resource.RLIM_INFINITY:
                found.append(max(0, most - int(used) * os.sysconf("SC_PAGE_SIZE")))
    return min(found, default=None)


def shared_bytes(*, with_swap: bool = True) -> int | None:
    """The bytes of the host's memory that the processes of this one's control group can still
    allocate together, or None where nobody knows."""
    found, swap = list[int](), 0
    with suppress(OSError, ValueError, KeyError):
        lines = dict(x.split(":") for x in Path("/proc/meminfo").read_text().splitlines())
        available, swap = (int(lines[x].split()[0]) << 10 for x in ("MemAvailable", "SwapFree"))
        swap *= with_swap
        found.append(available + swap)
    return min([*found, *left_in_groups(swap)], default=None)


def pool_name() -> str | None:
    """Text that is equal in processes that take memory from the same `shared_bytes`: they are on
    one host, in one container and in one control group. None where nobody knows."""
    try:
        return "".join(
            (
                Path("/proc/sys/kernel/random/boot_id").read_text(),
                os.readlink("/proc/self/ns/cgroup"),
                _groups(),
            )
        )
    except OSError:
        return None


def _groups() -> str:
    return Path("/proc/self/cgroup").read_text()


def left_in_groups(swap: int = 0) -> list[int]:
    """The bytes that the memory limits of this process's control groups leave, as in a container;
    none where there is no limit. Of so many bytes of swap they have what their limits of it leave.
    """
    try:
        return _left_in_groups(_groups(), Path("/sys/fs/cgroup"), swap)
    except (OSError, ValueError, KeyError):
        return []


def _left_in_groups(memberships: str, root: Path, swap: int = 0) -> list[int]:
    """The bytes that are left in the group of version 2 of cgroups that a process is a member of,
    and in each group around it."""
    (own,) = (line[3:] for line in memberships.splitlines() if line.startswith("0::"))
    group, found = root / own.lstrip("/"), list[int]()
    while group.is_relative_to(root):
        limit = group / "memory.max"  # which the root of the system has not
        if limit.exists() and (most := limit.read_text().strip()) != "max":
            pages = dict(x.split() for x in (group / "memory.stat").read_text().splitlines())
            # Pages of files are given up for others, as MemAvailable counts them.
            files = int(pages["active_file"]) + int(pages["inactive_file"])
            left = int(most) - int((group / "memory.current").read_text()) + files
            found.append(max(0, left) + _swap_left(group, swap))
        group = group.parent
    return found


def _swap_left(group: Path, swap: int) -> int:
    """The part of so many bytes of swap that a group may have: all, if nothing limits its swap."""
    limit = group / "memory.swap.max"
    if not limit.exists() or (most := limit.read_text().strip()) == "max":
        return swap
    return min(swap, max(0, int(most) - int((group / "memory.swap.current").read_text())))


def in_words(num_bytes: float) -> str:
    """A size in the largest unit that it reaches."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB")):
        if round(num_bytes / unit, 1) >= 1:
            return f"{num_bytes / unit:,.1f} {name}"
    return f"{num_bytes / 1024:,.1f} KiB"
