# SPDX-License-Identifier: BSD-3-Clause
"""Compiles C++ for tests: what has changed since the last time, and nothing else."""

import fcntl
import hashlib
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Compiler:
    """Several processes may share a folder `build`, which belongs to one set of flags."""

    build: Path
    flags: Sequence[str]
    root: Path = ROOT  # of sources and of relative paths in the flags
    header: Path | None = None  # in the repository; sources begin with it
    program: str | None = None  # by default that of CXX, or g++

    def compile(self, sources: Sequence[Path]) -> list[Path]:
        """The objects of `sources`, which are relative to the root."""
        flags = ["-xc++", "-MMD", *(self.precompiled_header() if self.header else ())]
        with self.lock(), ThreadPoolExecutor(os.cpu_count()) as pool:
            return list(pool.map(lambda source: self.compile_source(source, flags), sources))

    def precompiled_header(self) -> list[str]:
        """The flags with which g++ reads it. It is compiled once for all that share flags, as most
        sources take less time than the headers of a library."""
        assert self.header is not None
        digest = hashlib.sha256("\n".join(self.flags).encode()).hexdigest()[:16]
        folder = ROOT / "build" / "precompiled" / digest
        # What g++ looks for where it is told that the header is; the name inside is arbitrary.
        place = Compiler(folder / f"{self.header.name}.gch", self.flags)
        with place.lock():
            place.compile_source(self.header, ["-xc++-header", "-MD"])  # of the library, too
        return ["-include", str(folder / self.header.name)]

    def link(self, name: str, objects: Sequence[Path], flags: Sequence[str] = ()) -> Path:
        target = self.build / name
        with self.lock():
            if not is_newer(target, objects):
                self.make(target, *objects, *flags)
        return target

    def compile_source(self, source: Path, flags: Sequence[str]) -> Path:
        target = self.build / f"{source.as_posix().replace('/', '_')}.o"
        if not is_newer(target, self.dependencies(target)):
            dependencies = target.with_suffix(".d")
            self.make(target, *flags, "-MF", dependencies, "-c", source)
        return target

    def dependencies(self, target: Path) -> list[Path]:
        """The files that an object was compiled from; a missing one if that is unknown."""
        dependencies = target.with_suffix(".d")
        if not dependencies.exists():
            return [dependencies]
        names = dependencies.read_text().replace("\\\n", " ").split(":", 1)[1].split()
        return [self.root / name for name in names]

    def make(self, target: Path, *arguments: object) -> None:
        """Puts it in its place at once: whoever runs or links the one before is not disturbed."""
        start = time.time()
        new = target.with_name(f"{target.name}.new")
        program = self.program or os.environ.get("CXX", "g++")
        command = [program, *self.flags, *map(str, arguments), "-o", str(new)]
        result = subprocess.run(command, cwd=self.root, capture_output=True, text=True)
        if result.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}\n{result.stderr}")
        os.utime(new, (start, start))  # a source may have changed since
        new.replace(target)

    @contextmanager
    def lock(self) -> Iterator[None]:
        self.build.mkdir(parents=True, exist_ok=True)
        with (self.build / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def is_newer(target: Path, files: Sequence[Path]) -> bool:
    if not target.exists():
        return False
    made = target.stat().st_mtime
    return all(file.exists() and file.stat().st_mtime < made for file in files)
