# SPDX-License-Identifier: BSD-3-Clause
"""Memory and interrupts of this machine."""

from __future__ import annotations

import os
from pathlib import Path

# The rest is for whoever else is there.
_SHARE_OF_MEMORY = 0.85


def available_bytes() -> int:
    """Bytes of memory that the processes of a benchmark may use together."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(_SHARE_OF_MEMORY * 1024 * int(fields["MemAvailable"].split()[0]))


def softirq_seconds() -> float:
    """CPU time that the kernel has spent on what belongs to no process."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    return int(fields[7]) / os.sysconf("SC_CLK_TCK")
