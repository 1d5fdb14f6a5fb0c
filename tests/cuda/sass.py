# SPDX-License-Identifier: BSD-3-Clause
"""The machine instructions of the compiled kernels, read from the extension: no GPU is asked."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from tree_attention import _loader

INSTRUCTION_BYTES = 16
# The mangled name: <Element, TileConfig<Element, head_dim, rows>, ...>.
DECODE = r"lean_decode_kernelI"
# These arguments; without an element it is float.
CONFIG = re.compile(
    r"(?:NS_\d+(?P<element>\w*Float16)E|f).*?Li(?P<head_dim>\d+)ELi(?P<row_tile>\d+)E"
    r"(?:NS_\d(?P<cached>Int8|Float8)E)?"
)
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.x]*)([^;]*)")
_REGISTER = re.compile(r"\bR(\d+)")


@dataclass(frozen=True)
class Code:
    """The instructions of one kernel in the order of memory, and the operands of each."""

    name: str
    instructions: tuple[str, ...]
    operands: tuple[str, ...]
    lines: tuple[str, ...]  # of nvdisasm, with operands and labels

    def count(self, pattern: str) -> int:
        return len(self.positions(pattern))

    def positions(self, pattern: str) -> list[int]:
        return [i for i, name in enumerate(self.instructions) if re.match(pattern, name)]

    def writes(self, position: int) -> int:
        """The register that an instruction writes, or the first of several."""
        return int(_REGISTER.findall(self.operands[position])[0])

    def reads(self, position: int) -> set[int]:
        """The registers that are operands of an instruction, but for the first operand."""
        return set(map(int, _REGISTER.findall(self.operands[position].partition(",")[2])))

    @property
    def num_bytes(self) -> int:
        return len(self.instructions) * INSTRUCTION_BYTES


def find_tool(name: str) -> str:
    """A tool of the toolkit, or the one that triton brings along; skips the test without one."""
    folders = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin"]
    try:
        import triton

        folders.append(Path(triton.__file__).parent / "backends" / "nvidia" / "bin")
    except ImportError:
        pass
    path = os.pathsep.join([os.environ.get("PATH", ""), *map(str, folders)])
    tool = shutil.which(name, path=path)
    if tool is None:
        pytest.skip(f"no {name} in PATH, CUDA_HOME or triton")
    return tool


def extension_with_cuda() -> str:
    """The path of the extension; skips the test where it is built for the CPU alone."""
    extension = _loader.load()
    if extension.build_info()["cuda_version"] is None:
        pytest.skip("the extension is built without CUDA")
    assert extension.__file__ is not None
    return extension.__file__


def name_of(mangled: str) -> str:
    """The name of the source, as instances.py writes it, that defines the decode kernel whose
    mangled template arguments these are."""
    config = CONFIG.match(mangled)
    assert config is not None, mangled
    queries = {"BFloat16": "bf16", "Float16": "fp16", None: "fp32"}[config["element"]]
    cached = f"_{config['cached'].lower()}" if config["cached"] else ""
    return f"lean_decode_{queries}{cached}_{config['head_dim']}"


@functools.cache
def cubins() -> dict[str, dict[str, bytes]]:
    """The extension's cubins by target (sm_90), then by the source of their decode kernels, or by
    their first kernel: a compressed cubin has no name of its own."""
    found: dict[str, dict[str, bytes]] = {}
    with tempfile.TemporaryDirectory() as folder:
        extract = [find_tool("cuobjdump"), "-xelf", "all", extension_with_cuda()]
        subprocess.run(extract, cwd=folder, check=True, capture_output=True)
        for path in Path(folder).glob("*.cubin"):
            content = path.read_bytes()
            decode = re.search(rb"lean_decode_kernelI(\w+)", content)
            first = re.search(rb"\.text\.(\w+)", content)
            if decode is None and first is None:
                continue  # no kernel at all
            name = first[1].decode() if decode is None else name_of(decode[1].decode())
            architecture = path.name.split(".")[-2]
            assert name not in found.setdefault(architecture, {}), name
            found[architecture][name] = content
    return found


def text_of(cubin: bytes) -> str:
    """What nvdisasm makes of it."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [find_tool("nvdisasm"), "-c", file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def disassemble(source: str, architecture: str) -> list[Code]:
    """The kernels that `source`, a name that instances.py gives, defines for a target."""
    if architecture not in cubins():
        pytest.skip(f"the extension is not compiled for {architecture}, but for {[*cubins()]}")
    return parse(text_of(cubins()[architecture][source]))


def parse(text: str, name: str = DECODE) -> list[Code]:
    """The kernels in a disassembly whose mangled names have `name`, by what comes after it."""
    kernel = re.compile(rf"\.section\s+\.text\.\S*{name}(\S*?),")
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith("\t.section\t"):
            section = kernel.search(line)
            lines = found.setdefault(section[1], []) if section is not None else []
        else:
            lines.append(line)
    return [_kernel(name, lines) for name, lines in found.items()]


def _kernel(name: str, lines: list[str]) -> Code:
    instructions = [match.groups() for line in lines if (match := _INSTRUCTION.search(line))]
    names, operands = zip(*instructions, strict=True)
    return Code(name, names, operands, tuple(lines))
