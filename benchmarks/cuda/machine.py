# SPDX-License-Identifier: BSD-3-Clause
"""The GPU: what it is, what it was doing, and how fast it reads."""

import subprocess
from dataclasses import dataclass
from typing import Any

import torch

from ..harness.measure import InputArena
from . import read_probe, timing

# What the ceilings are measured with: far more than the cache.
CEILING_BYTES = 2 << 30
QUERIED = (
    "driver_version",
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "clocks.max.mem",
    "temperature.gpu",
    "power.draw",
    "power.limit",
)


@dataclass(frozen=True)
class Ceiling:
    """Bytes per second of a large buffer."""

    read: float
    copy: float  # counting bytes read and bytes written
    configuration: tuple[int, int, int]  # of the read probe, the fastest here


def ceiling(arena: InputArena) -> Ceiling:
    span = arena.view(0, (CEILING_BYTES,), torch.uint8)
    source, target = span.chunk(2)
    candidates = read_probe.candidates([span])
    calls: dict[str, timing.Call] = {str(c): call for c, call in candidates.items()}
    measured = timing.measure({**calls, "copy": lambda i: target.copy_(source)}, 1, 0.5).measured
    best = min(candidates, key=lambda c: measured[str(c)].graph.median)
    return Ceiling(
        read=CEILING_BYTES / measured[str(best)].graph.median,
        copy=CEILING_BYTES / measured["copy"].graph.median,
        configuration=best,
    )


def environment() -> dict[str, Any]:
    import triton

    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": f"{properties.name}, sm_{properties.major}{properties.minor}, "
        f"{properties.multi_processor_count} multiprocessors, "
        f"{properties.L2_cache_size >> 20} MiB of L2, {properties.total_memory >> 30} GiB",
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "triton": triton.__version__,
        "torch commit": torch.version.git_version,
        "gpu state before": state(),
    }


def state() -> dict[str, str] | str:
    """Driver, clocks, temperature and power, or why they are unknown."""
    command = ["nvidia-smi", f"--query-gpu={','.join(QUERIED)}", "--format=csv,noheader", "--id=0"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError) as error:
        return f"nvidia-smi: {error}"
    return dict(zip(QUERIED, output.stdout.strip().split(", "), strict=False))
