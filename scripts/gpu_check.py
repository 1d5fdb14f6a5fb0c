#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""Builds, tests, measures and sanitizes on this machine's GPU: `scripts/gpu_check.sh CALL OUT`.

  A   6 minutes: known answers of the PTX, a smoke test, a quick benchmark, profiles
  B   9 minutes: all tests, graphs, several ranks, HuggingFace
  C   8 minutes: compute-sanitizer, tiles and workers
  D   9 minutes: the benchmark beside all peers

The times are for 16 cores and include a build, which later calls do not repeat while the sources
stay the same. Nothing is fetched or installed. Every stage has processes of its own and a limit,
and the limits of a call fit into its time, so that no stage takes the time of another. OUT gets,
as each stage ends,

  CALL.json, CALL.md       the stages, their results and what they measured
  CALL.logs.tar.gz         all output, and the profiler's report
  decode_cuda*, tune_cuda* of the benchmarks, for benchmarks/results
  extension.tar.xz         in call A: what was built. Unpacked in this tree it saves another build

Exit status 0: every stage passed. Environment: PYTHON (else .venv/bin/python, else python3),
TORCH_CUDA_ARCH_LIST (else the GPU's).
"""

import hashlib
import json
import os
import re
import shutil
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

ROOT = Path(__file__).resolve().parents[1]
# Seconds between the signals that ask and that kill; a process that not even the second one ends,
# as in a driver that hangs, is left behind as many seconds later.
GRACE = 2
CANNOT_RUN = 77  # exit status of a program that lacks a tool or a device


@dataclass(frozen=True)
class Stage:
    name: str
    seconds: int  # it is ended after so long
    command: tuple[str, ...]  # {python}, {capability} (as in sm_90a), {results} (a folder)
    needs: tuple[str, ...] = ("a GPU", "build")


@dataclass(frozen=True)
class Call:
    seconds: int
    steps: tuple[tuple[Stage, ...], ...]  # one after the other; the stages of a step side by side


@dataclass
class Result:
    stage: str
    seconds: int
    result: str
    detail: str = ""  # the last line of its output
    measured: Any = None  # what it wrote into {results}/STAGE.json


def pytest(*arguments: str) -> tuple[str, ...]:
    """In workers, of which one that hangs or has lost the device is replaced. A signal would not
    interrupt a wait for the device."""
    options = ("-q", "-p", "no:cacheprovider", "--timeout", "60", "--timeout-method", "thread")
    return ("{python}", "-m", "pytest", *options, *arguments)


def files(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/cuda/test_cuda_{name}.py" for name in names)


# These need the device, or all cores, to themselves.
GRAPHS = files("graphs", "launches", "numerics", "workspace")
RANKS, HUGGINGFACE = files("ranks"), files("huggingface", "static_cache")
SMOKE = files("smoke")
SMOKE_COMMAND = ("{python}", "scripts/gpu_smoke.py", "{results}/smoke.json", *SMOKE)
# Not what is only named after CUDA: it compiles emulators or packages and asks no GPU.
HOST_ONLY = (
    *("emulat", "mutations", "resources", "packaging", "any_order", "old_architectures"),
    *("tensor_cores", "sass", "bench_cuda"),
)
ON_DEVICE = " and not ".join(("cuda", *HOST_ONLY))

BUILD = Stage("build", 145, ("{python}", "setup.py", "build_ext", "--inplace"), needs=())
ABLATIONS = Stage("ablations", 145, ("{python}", "-m", "benchmarks.cuda.ablations"), ("a GPU",))
PTX = """
nvcc -std=c++20 -O1 -gencode=arch=compute_$0,code=sm_$0 -Icsrc -Itests/cpp \
  tests/cuda_emulator/ptx_on_device.cu -o "$1/ptx_on_device" && "$1/ptx_on_device"
"""
MACHINE = """
nvidia-smi; nvcc --version; ncu --version; compute-sanitizer --version; nproc; free -g
"$0" --version; "$0" -m pip list
"""
# Registers and memory of every kernel go into the log.
EXTENSION = """
"$0" -m tree_attention info
cuobjdump --dump-resource-usage python/tree_attention/_C*.so
XZ_OPT=-T0 tar -cJf "$1/extension.tar.xz" python/tree_attention/_C*.so build/gpu_check.stamp
"""
EXTENSION_COMMAND = ("bash", "-ec", EXTENSION, "{python}", "{results}")
PROFILE = """
ncu --clock-control none --profile-from-start off --set full -f -o "$1/profile" \
  "$0" -m benchmarks.cuda.profile && "$0" -m benchmarks.cuda.profile "$1/profile"
"""
MEASURED = ("a GPU", "build", "smoke")
QUICK = ("{python}", "benchmarks/decode.py", "--device", "cuda", "--quick", "--budget", "45")
FULL = ("{python}", "benchmarks/decode.py", "--device", "cuda", "--full", "--budget", "330")
# A case takes three seconds or so, and one that has begun is ended.
TUNE = ("{python}", "-m", "benchmarks.cuda.tune", "--seconds", "1", "--budget", "40")
OUT = ("--out", "{results}")

CALLS = {
    "A": Call(360, (
        (
            BUILD,
            Stage("ptx", 60, ("bash", "-c", PTX, "{capability}", "{results}"), ("a GPU",)),
            Stage("machine", 30, ("bash", "-c", MACHINE, "{python}"), ()),
        ),
        (
            Stage("smoke", 65, SMOKE_COMMAND),
            Stage("extension", 60, EXTENSION_COMMAND, ("build",)),
        ),
        (Stage("benchmark", 65, (*QUICK, *OUT), MEASURED),),
        (Stage("profile", 60, ("bash", "-c", PROFILE, "{python}", "{results}"), MEASURED),),
    )),
    "B": Call(540, (
        (BUILD,),
        (Stage("tests", 150, pytest(
            "-n8", *(f"--ignore={name}" for name in (*SMOKE, *GRAPHS, *RANKS, *HUGGINGFACE)),
            "-k", ON_DEVICE, "tests",
        )),),
        (Stage("graphs", 80, pytest("-n1", *GRAPHS)),),
        (Stage("ranks", 60, pytest("-n1", *RANKS)),),
        (Stage("huggingface", 60, pytest("-n1", *HUGGINGFACE)),),
    )),
    "C": Call(480, (
        (BUILD, ABLATIONS),
        (Stage("sanitizer", 250, ("env", "SANITIZER_SECONDS=235", "scripts/sanitize_cuda.sh")),),
        (Stage("tune_cuda", 60, (*TUNE, *OUT)),),
    )),
    "D": Call(540, (
        (BUILD, ABLATIONS),
        # It writes its files at its end, which should come before that of its time.
        (Stage("benchmark", 375, (*FULL, *OUT)),),
    )),
}  # fmt: skip


class Run:
    """One call: the stages so far and the files about them."""

    def __init__(self, name: str, out: Path, scratch: Path) -> None:
        self.name, self.out, self.results = name, out, scratch / "results"
        self.logs = scratch / "logs"
        for folder in (out, self.results, self.logs):
            folder.mkdir(parents=True, exist_ok=True)
        self.begin = time.monotonic()
        self.done: list[Result] = []
        self.lock = threading.Lock()
        path = ROOT / ".venv/bin/python"
        self.python = os.environ.get("PYTHON") or str(path if path.exists() else "python3")
        cuda = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin"
        self.environment = os.environ | {
            "PYTHON": self.python,
            "LOGS": str(self.logs),
            "PATH": f"{os.environ['PATH']}:{cuda}",
            "PYTHONPATH": f"{ROOT / 'python'}:{ROOT}",
            "PYTHONUNBUFFERED": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "USE_CUDA": "1",
            "MAX_JOBS": os.environ.get("MAX_JOBS", str(os.cpu_count())),
            "OMP_NUM_THREADS": "2",
            # A test without its device fails; asking for devices initialises nothing.
            "REQUIRE_CUDA": "1",
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        }
        # Without pytest-xdist the tests run one after the other, and the first that hangs or loses
        # the device is the last.
        self.has_workers = self.ask(self.python, "-c", "import xdist").returncode == 0
        self.device, capability = self.describe_device()
        # Instructions of one generation only, which sm_90a has, need the a.
        self.capability = {"9.0": "9.0a"}.get(capability, capability)
        self.environment.setdefault("TORCH_CUDA_ARCH_LIST", self.capability)

    def ask(self, *command: str) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=5,
                cwd=ROOT,
                env=self.environment,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return subprocess.CompletedProcess(command, 1, "", str(error))

    def describe_device(self) -> tuple[str | None, str]:
        query = ("--query-gpu=name,compute_cap", "--format=csv,noheader", "--id=0")
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
        if missing:
            self.record(Result(stage.name, 0, f"not run: needs {' and '.join(missing)}"))
        elif stage == BUILD and built(self.environment):
            self.record(Result(stage.name, 0, "passed", "was built before"))
        else:
            begin = time.monotonic()
            result = self.execute(stage)
            if stage == BUILD and result == "passed":
                stamp_path().parent.mkdir(exist_ok=True)
                stamp_path().write_text(stamp(self.environment))
            found = Result(stage.name, round(time.monotonic() - begin), result)
            found.detail = last_line((self.logs / f"{stage.name}.log").read_text(errors="replace"))
            found.measured = read_json(self.results / f"{stage.name}.json")
            self.record(found)

    def execute(self, stage: Stage) -> str:
        """Runs it, for its time at most."""
        names = {"python": self.python, "results": str(self.results)}
        names["capability"] = self.capability.replace(".", "")
        command = [word if "\n" in word else word.format(**names) for word in stage.command]
        if not self.has_workers:
            command = [word for word in command if not re.fullmatch(r"-n\d+", word)]
        # The whole process group gets the signal: ranks and tools as well.
        limits = ["timeout", f"--kill-after={GRACE}", str(stage.seconds)]
        begin = time.monotonic()
        with (self.logs / f"{stage.name}.log").open("wb") as log:
            process = subprocess.Popen(
                [*limits, *command], stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, cwd=ROOT, env=self.environment,
            )  # fmt: skip
            try:
                status = process.wait(stage.seconds + 2 * GRACE)
            except subprocess.TimeoutExpired:
                return "FAILED: could not be ended"
        if status == 0:
            return "passed"
        if status == CANNOT_RUN:
            return "not run"
        if time.monotonic() - begin >= stage.seconds:
            return "FAILED: out of time"
        return f"FAILED: exit status {status}" if status > 0 else f"FAILED: signal {-status}"

    def record(self, result: Result) -> None:
        with self.lock:
            self.done.append(result)
            print(f"{result.stage:<11} {result.seconds:>4} s  {result.result:<24} {result.detail}",
                  flush=True)  # fmt: skip
            self.write()

    def write(self) -> None:
        seconds = round(time.monotonic() - self.begin)
        architectures = self.environment["TORCH_CUDA_ARCH_LIST"]
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT
        ).stdout.strip()
        summary = {
            "call": self.name, "device": self.device, "architectures": architectures,
            "commit": commit, "seconds": seconds, "stages": [asdict(r) for r in self.done],
        }  # fmt: skip
        (self.out / f"{self.name}.json").write_text(json.dumps(summary, indent=1) + "\n")
        lines = [f"# GPU check, call {self.name}", ""]
        lines += [f"{self.device}, built for {architectures}, {seconds} s", ""]
        lines += [
            "| stage | seconds | result | last line of its log |",
            "| --- | ---: | --- | --- |",
        ]
        lines += [f"| {r.stage} | {r.seconds} | {r.result} | {r.detail} |" for r in self.done]
        (self.out / f"{self.name}.md").write_text("\n".join(lines) + "\n")
        for path in [*self.results.glob("decode_cuda*"), *self.results.glob("tune_cuda*")]:
            shutil.copyfile(path, self.out / path.name)
        for path in self.results.glob("extension.tar.xz"):
            path.replace(self.out / path.name)
        with tarfile.open(self.out / f"{self.name}.logs.tar.gz", "w:gz") as archive:
            archive.add(self.logs, "logs")
            archive.add(self.results, "results")


def stamp_path() -> Path:
    return ROOT / "build/gpu_check.stamp"


def stamp(environment: dict[str, str]) -> str:
    """Of the sources, the architectures and the extensions that are there."""
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


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def main(arguments: list[str]) -> int:
    if len(arguments) != 2 or arguments[0] not in CALLS:
        print(f"usage: scripts/gpu_check.sh {'|'.join(CALLS)} OUT", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as scratch:
        run = Run(arguments[0], Path(arguments[1]).resolve(), Path(scratch))
        for step in CALLS[run.name].steps:
            run.run_step(step)
    failures = sum(r.result != "passed" for r in run.done)
    seconds = round(time.monotonic() - run.begin)
    print(f"\n{run.device}: {failures} of {len(run.done)} stages did not pass, {seconds} s")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
