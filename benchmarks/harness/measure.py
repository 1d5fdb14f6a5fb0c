# SPDX-License-Identifier: BSD-3-Clause
"""Timing: pinned threads, cold caches, alternating runs, and ceilings from the same run."""

import contextlib
import functools
import glob
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tree_attention import _loader

MIN_ROUNDS, MAX_ROUNDS = 7, 200


# A call is disturbed when its threads waited for a core longer than this share of its time.
DISTURBED_SHARE = 0.02
# Where calls are disturbed, a measurement goes on this many times longer to find enough others.
PATIENCE = 4.0


@dataclass(frozen=True)
class Samples:
    """Seconds of repeated runs of one thing, and what its last run returned."""

    seconds: Sequence[float]
    result: Any = None
    disturbed: int = 0  # runs left out of `seconds`, because other processes took the cores

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def percentile(self, percent: float) -> float:
        """The smallest sample that at least `percent` % of the samples do not exceed."""
        return float(np.percentile(self.seconds, percent, method="inverted_cdf"))

    def to_json(self) -> dict[str, float]:
        return {
            "median_us": self.median * 1e6,
            "p10_us": self.percentile(10) * 1e6,
            "p90_us": self.percentile(90) * 1e6,
            "runs": len(self.seconds),
            "disturbed": self.disturbed,
        }


class _Timer:
    """Times calls of one function and sets aside those that other processes disturbed."""

    def __init__(self, function: Callable[[int], Any]) -> None:
        self._function = function
        self._result: Any = None
        self.quiet: list[float] = []
        self.disturbed: list[float] = []

    def run(self, index: int) -> None:
        waited = waiting_seconds()
        begin = time.perf_counter()
        self._result = self._function(index)
        seconds = time.perf_counter() - begin
        waited = waiting_seconds() - waited
        (self.disturbed if waited > DISTURBED_SHARE * seconds else self.quiet).append(seconds)

    def samples(self) -> Samples:
        if len(self.quiet) < MIN_ROUNDS:  # too few to tell: all of them, and none left out
            return Samples(self.quiet + self.disturbed, self._result)
        return Samples(self.quiet, self._result, len(self.disturbed))


def time_alternating(
    functions: Mapping[str, Callable[[int], Any]],
    *,
    num_sets: int,
    seconds: float = 0.0,
    warm: bool = False,
) -> dict[str, Samples]:
    """Times the functions in turn (a, b, c, a, b, c, ...), so that drift of the machine meets all.

    Each call gets the index of an input set. Cold: every call takes the next set, the one that
    was read longest ago. Warm: an untimed call on the same set comes first. Rounds repeat for
    `seconds`, and up to PATIENCE times longer until every function has MIN_ROUNDS undisturbed
    calls; within MIN_ROUNDS and MAX_ROUNDS. One untimed round comes before.
    """
    for function in functions.values():
        function(0)
    timers = {name: _Timer(function) for name, function in functions.items()}
    calls, begin = 0, time.perf_counter()
    for done in range(MAX_ROUNDS):
        elapsed = time.perf_counter() - begin
        enough = min(len(timer.quiet) for timer in timers.values()) >= MIN_ROUNDS
        if done >= MIN_ROUNDS and elapsed >= seconds * (1.0 if enough else PATIENCE):
            break
        for name, timer in timers.items():
            calls += 1
            index = calls % num_sets
            if warm:
                functions[name](index)
            timer.run(index)
    return {name: timer.samples() for name, timer in timers.items()}


def time_in_step(
    functions: Mapping[str, Callable[[int], Any]], *, num_sets: int, rounds: int
) -> dict[str, Samples]:
    """Like `time_alternating` for functions that exchange with other ranks: the number of rounds
    is given, so that it is the same on all of them, and no call is left out, because threads that
    wait for each other's cores are part of what an exchange costs."""
    for function in functions.values():
        function(0)
    samples: dict[str, list[float]] = {name: [] for name in functions}
    results: dict[str, Any] = {}
    calls = 0
    for _ in range(rounds):
        for name, function in functions.items():
            calls += 1
            begin = time.perf_counter()
            results[name] = function(calls % num_sets)
            samples[name].append(time.perf_counter() - begin)
    return {name: Samples(samples[name], results[name]) for name in functions}


def waiting_seconds() -> float:
    """Return how long threads of this process were ready to run while others had the cores.

    Zero where the system does not tell (only Linux does).
    """
    total = 0
    for path in glob.glob("/proc/self/task/*/schedstat"):
        with contextlib.suppress(FileNotFoundError), open(path) as file:  # a thread may just end
            total += int(file.read().split()[1])
    return total * 1e-9


@functools.cache
def probe() -> Any:
    """The module in probe.cpp, compiled when it has changed."""
    from torch.utils import cpp_extension  # which looks for CUDA and says what it finds

    source = Path(__file__).with_name("probe.cpp")
    build = source.parents[2] / "build" / "benchmarks" / f"torch-{torch.__version__}"
    build.mkdir(parents=True, exist_ok=True)
    return cpp_extension.load(
        "tree_attention_probe",
        str(source),
        # -fopenmp is for the compiler only: see setup.py.
        extra_cflags=["-O3", "-std=c++20", "-fopenmp", "-Wall", "-Wextra"],
        build_directory=str(build),
    )


def pin_threads(first: int = 0) -> list[int]:
    """Pins the operators' threads to the CPUs this process may use, one each, from the `first`-th.

    Returns those CPUs; empty when a thread could not be pinned or is not where it should be.
    """
    if not hasattr(os, "sched_getaffinity"):
        return []
    allowed = sorted(os.sched_getaffinity(0))
    cpus = allowed[first : first + torch.get_num_threads()]
    return cpus if probe().pin_threads(cpus) == cpus else []


def read_memory(*tensors: Tensor) -> None:
    """Reads every byte of contiguous tensors once, on all threads, as fast as the machine can."""
    probe().read_memory([(t.data_ptr(), t.numel() * t.element_size()) for t in tensors])


def fma_peak() -> float:
    """float32 operations per second of all threads with fused multiply-adds in registers."""
    return _best_rate(probe().multiply_add, 200_000)


def amx_peak() -> float:
    """bfloat16 operations per second of all threads with AMX tiles in registers; 0 without AMX."""
    if _loader.load().cpu_instruction_set() != "amx":  # which also asked the system for them
        return 0.0
    return _best_rate(probe().multiply_add_bf16_tiles, 20_000)


def _best_rate(multiply_add: Callable[[int], float], repeats: int) -> float:
    """The best of several runs: nothing but a disturbance can slow one down."""
    best = 0.0
    for _ in range(20):
        begin = time.perf_counter()
        operations = multiply_add(repeats)
        best = max(best, operations / (time.perf_counter() - begin))
    return best


def last_level_cache_bytes() -> int:
    """Return the size of the largest cache; 32 MiB where the system reports nothing."""
    sizes = [32 << 20]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text[:-1]) << {"K": 10, "M": 20, "G": 30}[text[-1]])
    return max(sizes)


class InputArena:
    """One allocation, cut into the input sets of each case: its pages are touched only once."""

    def __init__(self, num_bytes: int, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._bytes = torch.zeros(num_bytes, dtype=torch.uint8, device=device)

    @staticmethod
    def num_sets(set_bytes: int) -> int:
        """Sets to rotate over so that twice the last-level cache is read between two visits."""
        return max(2, -(-2 * last_level_cache_bytes() // set_bytes))

    def view(self, index: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The `index`-th tensor of this shape, end to end from the start of the arena."""
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        return self._bytes.narrow(0, index * num_bytes, num_bytes).view(dtype).view(*shape)


def decode_set(
    decode: Callable[..., tuple[Tensor, Tensor]],
    q: Tensor,
    sets: Sequence[tuple[Tensor, Tensor]],
    index: int,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """`decode` over the keys and values of one set, once a GPU has them."""
    result = decode(q, *sets[index], **options)
    if q.is_cuda:
        torch.cuda.synchronize()
    return result


class Load:
    """Shares of the machine's CPU time while the block ran; None where the system does not tell."""

    busy: float | None = None  # of all processes together
    own: float | None = None  # of this one, and of those that it waited for

    def __enter__(self) -> "Load":
        self._begin = self._read()
        return self

    def __exit__(self, *exception: object) -> None:
        end = self._read()
        if self._begin is not None and end is not None:
            total, busy, own = (e - b for e, b in zip(end, self._begin, strict=True))
            if total:
                self.busy, self.own = busy / total, own / total

    @property
    def others(self) -> float | None:
        return None if self.busy is None or self.own is None else max(0.0, self.busy - self.own)

    @staticmethod
    def _read() -> tuple[float, float, float] | None:
        """(all, busy, own) CPU seconds so far."""
        stat = Path("/proc/stat")
        if not stat.exists():
            return None
        ticks = [int(field) for field in stat.read_text().split("\n", 1)[0].split()[1:9]]
        per_second = os.sysconf("SC_CLK_TCK")
        own = sum(os.times()[:4])
        idle = ticks[3] + ticks[4]
        return sum(ticks) / per_second, (sum(ticks) - idle) / per_second, own


def load_warnings(shares: Sequence[float | None]) -> list[str]:
    """Warn when other processes took `shares` of the CPU time during the rows."""
    largest = max((share for share in shares if share is not None), default=0.0)
    if largest <= 0.02:
        return []
    return [
        f"other processes took up to {100 * largest:.0f} % of the CPU time during a row; "
        "end them and repeat for figures to rely on"
    ]


def peak_memory_of(function: Callable[[], Any], device: str = "cpu") -> int | None:
    """Bytes by which the resident memory of the process peaks above its start during a call; on
    "cuda" the tensors of the device.

    None where the high-water mark cannot be reset (only Linux can).
    """
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        function()
        return torch.cuda.max_memory_allocated() - start
    reset = Path("/proc/self/clear_refs")
    if not os.access(reset, os.W_OK):
        return None
    reset.write_text("5")
    before = _status_bytes("VmRSS")
    function()
    return max(0, _status_bytes("VmHWM") - before)


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) << 10
    raise ValueError(f"/proc/self/status has no field {field}")
