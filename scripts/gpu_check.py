#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""Builds, tests, measures and sanitizes on this machine's GPU.

    scripts/gpu_check.sh OUT [EARLIER]

A call takes ten minutes at most, or CALL_SECONDS. Its stages are in the order of what they are
worth (gpu_stages.py): first what decides how the kernel goes on, then the tests, file by file.
Every stage has processes of its own and a limit, and ends with the call. EARLIER is the check.json
of a call before this one, of the same sources: what has come to its end there, right or wrong, is
not run again. Nothing is fetched or installed. OUT gets, as each stage ends,

  check.json, check.md   the stages, their results and what they measured
  results.tar.gz         these, and the benchmarks' reports, for `benchmarks.cuda.predict --take`
  logs.tar.gz            all output, the tests' results by name, and the profiler's report
  extension.tar.xz       what was built. Unpacked in this tree it saves another build

Exit status 0: every stage passed. Environment: PYTHON (else .venv/bin/python, else python3),
TORCH_CUDA_ARCH_LIST (else the GPU's), CALL_SECONDS, EXTENSION (a library that was built for this
Python, torch and GPU: it is built only where that one cannot be loaded), PEERS (libraries for
`benchmarks/decode.py --peers`, with spaces between).
"""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from gpu_stages import BUILD, NEEDED, SECONDS, STAGES, Stage

ROOT = Path(__file__).resolve().parents[1]
# Seconds between the signals that ask and that kill; a process that not even the second one ends,
# as in a driver that hangs, is left behind as many seconds later.
GRACE = 4
LAST = 45  # seconds between a stage's budget and its end, for what it has begun by then
CANNOT_RUN = 77  # exit status of a program that lacks a tool or a device
# Importing the package alone loads no extension.
HAS_CUDA = "from tree_attention import _loader; assert _loader.load().build_info()['cuda_version']"


@dataclass
class Result:
    stage: str
    seconds: int
    result: str
    detail: str = ""  # the last line of its output
    measured: Any = None  # what it wrote into {results}/STAGE.json, or of its tests


class Run:
    """One call: the stages so far, what an earlier call has of them, and the files about them."""

    def __init__(self, out: Path, scratch: Path, earlier: dict[str, Result]) -> None:
        self.out, self.results, self.logs = out, scratch / "results", scratch / "logs"
        self.earlier = {name: x for name, x in earlier.items() if name not in NEEDED}
        for folder in (out, self.results, self.logs):
            folder.mkdir(parents=True, exist_ok=True)
        self.begin = time.monotonic()
        self.end = self.begin + int(os.environ.get("CALL_SECONDS") or SECONDS)
        self.done: list[Result] = []
        self.lock = threading.Lock()
        path = ROOT / ".venv/bin/python"
        self.python = os.environ.get("PYTHON") or str(path if path.exists() else "python3")
        cuda = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin"
        self.environment = os.environ | {
            "PYTHON": self.python,
            "LOGS": str(self.logs),
            "PATH": f"{os.environ['PATH']}:{cuda}",
            "PYTHONPATH": ":".join([str(ROOT / "python"), str(ROOT), *given_paths()]),
            "PYTHONUNBUFFERED": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "USE_CUDA": "1",
            "LINE_INFO": "1",  # for profiles
            "MAX_JOBS": os.environ.get("MAX_JOBS", str(os.cpu_count())),
            "OMP_NUM_THREADS": "2",
            # A test without its device fails; asking for devices initialises nothing.
            "REQUIRE_CUDA": "1",
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
            # Streams of virtual ranks, which wait for one another, share no queue.
            "CUDA_DEVICE_MAX_CONNECTIONS": "32",
        }
        # Without pytest-xdist the tests run one after the other, and the first that hangs or loses
        # the device is the last.
        self.has_workers = self.ask(self.python, "-c", "import xdist").returncode == 0
        self.device, self.capability = self.describe_device()
        self.environment.setdefault("TORCH_CUDA_ARCH_LIST", self.capability)

    def ask(self, *command: str) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=60,  # a driver that nobody uses loads at the first question
                cwd=ROOT,
                env=self.environment,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return subprocess.CompletedProcess(command, 1, "", str(error))

    def describe_device(self) -> tuple[str | None, str]:
        query = ("--query-gpu=name,compute_cap", "--format=csv,noheader", "--id=0")
        found = self.ask("nvidia-smi", *query)
        if found.returncode != 0:
            found = self.ask("nvidia-smi", *query)
        (self.logs / "device.log").write_text(found.stdout + found.stderr)
        name, _, capability = found.stdout.strip().rpartition(", ")
        return (name, capability) if found.returncode == 0 and name else (None, "9.0")

    def passed(self, what: str) -> bool:
        if what == "a GPU":
            return self.device is not None
        return any(r.stage == what and r.result == "passed" for r in self.done)

    def run_step(self, stages: tuple[Stage, ...]) -> None:
        with ThreadPoolExecutor(len(stages)) as pool:
            list(pool.map(self.run_stage, stages))

    def run_stage(self, stage: Stage) -> None:
        missing = [what for what in stage.needs if not self.passed(what)]
        seconds = min(stage.seconds, int(self.end - time.monotonic()) - 2 * GRACE)
        if (known := self.earlier.get(stage.name)) and not known.result.startswith("not run"):
            self.record(known)
        elif missing:
            self.record(Result(stage.name, 0, f"not run: needs {' and '.join(missing)}"))
        elif stage == BUILD and built(self.environment):
            self.record(Result(stage.name, 0, "passed", "was built before"))
        elif stage == BUILD and (name := self.use_extension()) is not None:
            self.note_build()
            self.record(Result(stage.name, 0, "passed", f"{name} is used"))
        elif seconds < stage.least:
            self.record(Result(stage.name, 0, "not run: no time is left"))
        else:
            begin = time.monotonic()
            result = self.execute(stage, seconds)
            found = Result(stage.name, round(time.monotonic() - begin), result)
            found.detail = last_line((self.logs / f"{stage.name}.log").read_text(errors="replace"))
            found.measured = read_json(self.results / f"{stage.name}.json") or read_junit(
                self.results / f"{stage.name}.xml"
            )
            if stage == BUILD and result == "passed":
                self.note_build()
            self.record(found)

    def note_build(self) -> None:
        stamp_path().parent.mkdir(exist_ok=True)
        stamp_path().write_text(stamp(self.environment))

    def use_extension(self) -> str | None:
        """Puts EXTENSION in the place of a build, and returns its name, or None if it is none."""
        path = Path(os.environ.get("EXTENSION", ""))
        if not path.is_file():
            return None
        shutil.copyfile(path, ROOT / "python/tree_attention" / path.name)
        loaded = self.ask(self.python, "-c", HAS_CUDA)
        (self.logs / "given_extension.log").write_text(loaded.stdout + loaded.stderr)
        if loaded.returncode == 0:
            return path.name
        (ROOT / "python/tree_attention" / path.name).unlink()
        return None

    def execute(self, stage: Stage, seconds: int) -> str:
        """Runs it, for its time at most."""
        names = {"python": self.python, "results": str(self.results)}
        names["capability"] = self.capability.replace(".", "")
        names["budget"] = str(max(seconds - LAST, 5))
        command = [word if "\n" in word else word.format(**names) for word in stage.command]
        if not self.has_workers:
            command = [word for word in command if not re.fullmatch(r"-n\d+", word)]
        # The whole process group gets the signal: ranks and tools as well. After this one pytest
        # still writes its report.
        limits = ["timeout", "--signal=INT", f"--kill-after={GRACE}", str(seconds)]
        begin = time.monotonic()
        with (self.logs / f"{stage.name}.log").open("wb") as log:
            process = subprocess.Popen(
                [*limits, *command], stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, cwd=ROOT, env=self.environment,
            )  # fmt: skip
            try:
                status = process.wait(seconds + 2 * GRACE)
            except subprocess.TimeoutExpired:
                return "FAILED: could not be ended"
        if status == 0:
            return "passed"
        if status == CANNOT_RUN:
            return "not run"
        if time.monotonic() - begin >= seconds:
            return "FAILED: out of time" if seconds == stage.seconds else "not run to its end"
        return f"FAILED: exit status {status}" if status > 0 else f"FAILED: signal {-status}"

    def record(self, result: Result) -> None:
        with self.lock:
            self.done.append(result)
            print(f"{result.stage:<11} {result.seconds:>4} s  {result.result:<24} {result.detail}",
                  flush=True)  # fmt: skip
            try:
                self.write()
            except OSError as error:  # the next stage writes again
                print(f"{self.out} is not complete: {error}", flush=True)

    def write(self) -> None:
        environment = {
            "command": "scripts/gpu_check.sh OUT",
            "commit": self.ask("git", "rev-parse", "HEAD").stdout.strip(),
            "device": self.device,
            "architectures": self.environment["TORCH_CUDA_ARCH_LIST"],
            "seconds": round(time.monotonic() - self.begin),
        }
        summary = environment | {"stages": [asdict(r) for r in self.done]}
        (self.out / "check.json").write_text(json.dumps(summary, indent=1) + "\n")
        lines = ["# GPU check", "", "```", *(f"{name}: {x}" for name, x in environment.items())]
        lines += ["```", "", "| stage | seconds | result | last line of its log |"]
        lines += ["| --- | ---: | --- | --- |"]
        lines += [f"| {r.stage} | {r.seconds} | {r.result} | {r.detail} |" for r in self.done]
        (self.out / "check.md").write_text("\n".join(lines) + "\n")
        for path in self.results.glob("extension.tar.xz"):
            shutil.move(path, self.out / path.name)  # perhaps on another file system
        reports = [self.out / "check.json", self.out / "check.md"]
        reports += [x for x in self.results.iterdir() if x.suffix in (".json", ".md")]
        with tarfile.open(self.out / "results.tar.gz", "w:gz") as archive:
            for path in reports:
                archive.add(path, path.name)
        with tarfile.open(self.out / "logs.tar.gz", "w:gz") as archive:
            archive.add(self.logs, "logs")
            archive.add(self.results, "results")


def stamp_path() -> Path:
    return ROOT / "build/gpu_check.stamp"


def stamp(environment: dict[str, str]) -> str:
    """Of the sources, the choices of the build and the extensions that are there."""
    paths = [ROOT / "setup.py", *sorted(p for p in (ROOT / "csrc").rglob("*") if p.is_file())]
    paths += sorted((ROOT / "python/tree_attention").glob("_C*.so"))
    digest = hashlib.sha256(environment["TORCH_CUDA_ARCH_LIST"].encode())
    for path in paths:
        digest.update(f"{path.relative_to(ROOT)} {path.stat().st_size} ".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest() + "\n"


def built(environment: dict[str, str]) -> bool:
    path = stamp_path()
    return path.exists() and path.read_text() == stamp(environment)


def last_line(text: str) -> str:
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return "".join(c for c in lines[-1] if c.isprintable() and c != "|")[:100] if lines else ""


def read_junit(path: Path) -> Any:
    """Counts of tests, and the names of those that failed."""
    try:
        cases = list(ElementTree.parse(path).iter("testcase"))
    except (OSError, ElementTree.ParseError):
        return None
    failed = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
    return {
        "tests": len(cases),
        "skipped": sum(case.find("skipped") is not None for case in cases),
        "failed": [f"{case.get('classname')}::{case.get('name')}" for case in failed],
    }


def given_paths() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(":") if path]


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def main(arguments: list[str]) -> int:
    if len(arguments) not in (1, 2):
        print("usage: scripts/gpu_check.sh OUT [EARLIER]", file=sys.stderr)
        return 2
    earlier = {}
    if len(arguments) == 2:
        stages = json.loads(Path(arguments[1]).read_text())["stages"]
        earlier = {stage["stage"]: Result(**stage) for stage in stages}
    # Who starts it in the background has it ignore the signal, and with it all stages.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as scratch:
        run = Run(Path(arguments[0]).resolve(), Path(scratch), earlier)
        for step in STAGES:
            run.run_step(step)
    failures = sum(r.result != "passed" for r in run.done)
    seconds = round(time.monotonic() - run.begin)
    device = run.device or "no GPU"
    print(f"\n{device}: {failures} of {len(run.done)} stages did not pass, {seconds} s")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
