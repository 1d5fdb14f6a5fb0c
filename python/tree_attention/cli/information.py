# SPDX-License-Identifier: BSD-3-Clause
"""The rows that `info` prints: versions, backends, and why one of them is unavailable."""

import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from rich.table import Table

import tree_attention
from tree_attention import _loader

from .usage import plain_console, printable

NOT_BUILT = f"unavailable: torch {torch.__version__} is built without it"


def run() -> None:
    """Prints the rows, as a table where a terminal shows it."""
    if not sys.stdout.isatty():
        # A report that is piped or pasted keeps its paths and commands on one line.
        found = list(rows())
        width = max(len(name) for name, _ in found)
        for name, value in found:
            print(f"{name:<{width}} {printable(value)}")
        return
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows():
        table.add_row(name, value)
    plain_console().print(table, soft_wrap=False)


def rows() -> Iterator[tuple[str, str]]:
    extension = _loader.load()
    build = extension.build_info()
    if "RANK" in os.environ:  # of torchrun's, which all print
        yield "rank", printable(f"{os.environ['RANK']}, on {platform.node()}")
    yield "tree_attention", f"{tree_attention.__version__}, {Path(tree_attention.__file__).parent}"
    yield "python", f"{platform.python_version()}, {platform.platform()}"
    yield "torch", f"{torch.__version__}; extension built for {build['torch_version']}"
    yield "compiler", build["compiler"]
    yield "cpu", cpu_name()
    yield "instruction set", extension.cpu_instruction_set()
    yield "threads", f"{torch.get_num_threads()}; OpenMP runtime {', '.join(openmp_runtimes())}"
    yield "cuda kernels", cuda_kernels(build["cuda_version"], build["cuda_architectures"])
    yield "cuda devices", cuda_devices()
    yield "gloo", "available" if dist.is_gloo_available() else NOT_BUILT
    yield "nccl", nccl()
    yield "strategies", ", ".join(tree_attention.strategies())
    yield "transformers", transformers()


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name, and the numbers that tell generations of the same name apart."""
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    values = dict(re.findall(r"^([^\t\n:]+?)\s*: *(.*)$", text, re.MULTILINE))
    if "model name" not in values:
        return platform.processor() or platform.machine()
    name = values["model name"].strip()
    if not values.keys() >= {"cpu family", "model"}:
        return name
    return f"{name} (family {values['cpu family']}, model {values['model']})"


def openmp_runtimes() -> list[str]:
    """The files of the OpenMP runtimes in this process; each of several would start its own
    threads on all cores."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return ["unknown"]
    files = {line.split()[-1] for line in maps.read_text().splitlines() if ".so" in line}
    return sorted(f for f in files if Path(f).name.startswith(("libgomp", "libiomp", "libomp")))


def cuda_kernels(nvcc_version: str | None, architectures: str | None) -> str:
    if nvcc_version is None:
        return f"not built. Where nvcc is installed: export USE_CUDA=1; {_loader.rebuild_command()}"
    return f"built by nvcc {nvcc_version} for {architectures}"


def cuda_devices() -> str:
    if torch.version.cuda is None:
        return f"unavailable: torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "unavailable: torch finds no CUDA driver or no device"
    return ", ".join(
        f"{torch.cuda.get_device_name(i)} (sm_{major}{minor}"
        f"{'' if major >= 8 else ', too old: kernels need sm_80'})"
        for i in range(torch.cuda.device_count())
        for major, minor in [torch.cuda.get_device_capability(i)]
    )


def nccl() -> str:
    if not dist.is_nccl_available():
        return NOT_BUILT
    version = ".".join(map(str, torch.cuda.nccl.version()))
    return version if torch.cuda.is_available() else f"{version}, without a CUDA device to use it"


def transformers() -> str:
    if importlib.util.find_spec("transformers") is None:
        return f"not installed: {_loader.INSTALL_TRANSFORMERS}"
    from packaging.version import Version

    version = importlib.metadata.version("transformers")
    if Version(version) < Version(_loader.MINIMUM_TRANSFORMERS):
        required = f">= {_loader.MINIMUM_TRANSFORMERS} is required"
        return f"{version} is too old: {required}, {_loader.INSTALL_TRANSFORMERS}"
    return version + _loader.beyond_tested_transformers(version)
