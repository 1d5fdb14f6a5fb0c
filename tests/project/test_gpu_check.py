# SPDX-License-Identifier: BSD-3-Clause
"""scripts/gpu_check.sh without a GPU, with programs that stand in for Python and NVIDIA's tools."""

import ast
import json
import os
import runpy
import shutil
import subprocess
import sys
import tarfile
from collections import Counter
from pathlib import Path

import pytest

from tree_attention import _loader

pytestmark = pytest.mark.deep
ROOT = Path(__file__).parents[2]
GPU_FIXTURES = {"device", "cuda", "cuda_kernels", "hopper", "huge", "nccl"}
# The ablations cannot be built, the benchmark hangs and writes what it has, and one test fails.
PYTHON = """#!/bin/bash
echo "$*" >>calls
case "$*" in
  *setup.py*) touch python/tree_attention/_C.so; echo "for $TORCH_CUDA_ARCH_LIST" ;;
  *cuda.ablations*) [[ -e again ]] || exit 1 ;;
  *decode.py*--only*) ;;
  *decode.py*--quick*) echo '{"rows": [1]}' >"${!#}/decode_cuda_quick.json"; exec sleep 100 ;;
  *8_bit_keys*) for word; do [[ $word == --junitxml=* ]] && cp report "${word#*=}"; done; exit 1 ;;
esac
"""
REPORT = """<testsuites><testsuite>
<testcase classname="a" name="b"/><testcase classname="a" name="c[1]"><failure/></testcase>
</testsuite></testsuites>"""


def test_a_call_and_the_one_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be built, hangs or fails is said; the next call does what is left."""
    for folder in ("scripts", "csrc", "python/tree_attention", "bin"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("gpu_check.py", "gpu_check.sh", "gpu_stages.py"):
        text = (ROOT / "scripts" / name).read_text()
        text = text.replace('Stage("benchmark", 120', 'Stage("benchmark", 6')
        (tmp_path / "scripts" / name).write_text(text)
    (tmp_path / "setup.py").write_text("")
    (tmp_path / "report").write_text(REPORT)
    tools = dict.fromkeys(("nvcc", "ncu", "cuobjdump", "compute-sanitizer"), "#!/bin/bash\n")
    tools |= {"nvidia-smi": '#!/bin/bash\necho "A GPU, 9.0"', "python": PYTHON}
    for name, text in tools.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHON", str(tmp_path / "bin/python"))
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)

    def call(out: str, *earlier: str) -> dict[str, dict]:
        command = ["bash", "scripts/gpu_check.sh", out, *earlier]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 1, done.stdout + done.stderr
        stages = json.loads((tmp_path / out / "check.json").read_text())["stages"]
        return {stage["stage"]: stage for stage in stages}

    first = call("first")
    wrong = {
        "ablations": "FAILED: exit status 1",
        "benchmark": "FAILED: out of time",
        "8_bits": "FAILED: exit status 1",
        "ptx": "FAILED: exit status 127",  # nvcc made no program
        **dict.fromkeys(("stamps", "tune_cuda"), "not run: needs ablations"),
        "sanitizer": "FAILED: exit status 127",
    }
    assert {n: x["result"] for n, x in first.items() if x["result"] != "passed"} == wrong
    assert first["8_bits"]["measured"] == {"tests": 2, "skipped": 0, "failed": ["a::c[1]"]}
    assert first["build"]["detail"] == "for 9.0"
    with tarfile.open(tmp_path / "first/results.tar.gz") as found:
        assert {"check.json", "decode_cuda_quick.json"} <= {*found.getnames()}
    (tmp_path / "calls").unlink()
    (tmp_path / "again").touch()
    second = call("second", "first/check.json")
    for later in ("ablations", "stamps", "tune_cuda"):
        assert second[later]["result"] == "passed" and wrong.pop(later)
    assert {n: x["result"] for n, x in second.items() if x["result"] != "passed"} == wrong
    calls = (tmp_path / "calls").read_text()
    assert "cuda.stamps" in calls and "decode.py" not in calls and "8_bit_keys" not in calls


def test_the_time_of_a_call_ends_it(tmp_path: Path) -> None:
    """Where there is no GPU, and no time for what needs none."""
    environment = os.environ | {"PATH": "/usr/bin:/bin", "CALL_SECONDS": "10"}
    command = [sys.executable, ROOT / "scripts/gpu_check.py", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    results = {x["result"] for x in json.loads((tmp_path / "check.json").read_text())["stages"]}
    assert done.returncode == 1 and "passed" not in results
    assert "\nno GPU: " in done.stdout
    assert {"not run: no time is left", "not run: needs a GPU"} <= results


def test_nothing_is_compiled_where_there_is_no_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take minutes, for stages that cannot run."""
    (tmp_path / "bin").mkdir()
    for name, text in {"nvidia-smi": "exit 9", "python": 'echo "$*" >>"$CALLS"'}.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    calls = tmp_path / "calls"
    monkeypatch.setenv("CALLS", str(calls))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHON", str(tmp_path / "bin/python"))
    command = [sys.executable, ROOT / "scripts/gpu_check.py", tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True)
    stages = json.loads((tmp_path / "out/check.json").read_text())["stages"]
    assert done.returncode == 1
    assert "xdist" in calls.read_text() and "setup.py" not in calls.read_text()
    results = {x["stage"]: x["result"] for x in stages if x["stage"] != "machine"}
    assert results["build"] == "not run: needs a GPU"
    assert all(result.startswith("not run: needs ") for result in results.values())


def test_a_given_extension_has_to_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would be taken for the build, and no stage would have kernels."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import gpu_check

    built = Path(_loader.load().__file__ or "")
    package = tmp_path / "python/tree_attention"
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / "python/tree_attention", package, ignore=ignored)
    (tmp_path / "given").mkdir()
    given = tmp_path / "given" / built.name
    monkeypatch.setattr(gpu_check, "ROOT", tmp_path)
    monkeypatch.setenv("PYTHON", sys.executable)
    monkeypatch.setenv("EXTENSION", str(given))
    run = gpu_check.Run(tmp_path / "out", tmp_path / "scratch", {})
    given.write_bytes(built.read_bytes()[:1000])
    assert run.use_extension() is None and not (package / built.name).exists()
    assert "the extension" in (run.logs / "given_extension.log").read_text()
    shutil.copyfile(built, given)
    has_cuda = _loader.load().build_info()["cuda_version"] is not None
    assert run.use_extension() == (built.name if has_cuda else None)


def gpu_tests_by_file() -> dict[str, list[ast.FunctionDef]]:
    """The tests of each file that a fixture runs on a GPU, where there is one."""
    found: dict[str, list[ast.FunctionDef]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for f in ast.parse(path.read_text()).body:
            if isinstance(f, ast.FunctionDef) and GPU_FIXTURES & {a.arg for a in f.args.args}:
                found.setdefault(str(path.relative_to(ROOT)), []).append(f)
    return found


def test_no_file_is_first_run_on_a_gpu() -> None:
    """A test of each also runs with emulated kernels, but where what it runs is compiled for the
    GPU, or asks the profiler."""
    only_there = {
        file
        for file, tests in gpu_tests_by_file().items()
        if all(
            any(ast.unparse(x).startswith("pytest.mark.gpu(") for x in f.decorator_list)
            for f in tests
            if f.name.startswith("test_")
        )
    }
    assert only_there == {"tests/cuda/test_cuda_ptx.py", "tests/cuda/test_cuda_ranges.py"}


def test_peers_are_in_every_program_that_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEERS", "one.so two.so")
    stages = runpy.run_path(str(ROOT / "scripts/gpu_stages.py"))["STAGES"]
    with_peers = {
        x.name for step in stages for x in step if "--peers one.so two.so" in " ".join(x.command)
    }
    assert with_peers == {"peers", "benchmark", "all_rows", "lost_device"}


def test_every_file_of_gpu_tests_is_in_a_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for those of the gate, of what was corrected, and of graphs, which several stages
    share."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    from gpu_check import GRACE, SECONDS, STAGES

    assert SECONDS + 2 * GRACE < 600  # with what ends and is killed beside a call's own time
    stages = [stage for step in STAGES for stage in step if stage.name not in ("gate", "corrected")]
    run = Counter(x for stage in stages for x in stage.command if x.startswith("tests/"))
    run["tests/cuda/test_cuda_graphs.py"] -= 2
    files = gpu_tests_by_file().keys() - {"tests/project/test_packaging.py"}  # without a GPU
    assert run == dict.fromkeys(files, 1)


# What the -k of each stage leaves of its files, of which this process imports each once.
COLLECT = """
import json, sys
import pytest
from gpu_stages import STAGES

class Items:
    def pytest_collection_finish(self, session):
        self.names = [item.nodeid for item in session.items]

found = {}
for stage in (stage for step in STAGES for stage in step if "pytest" in stage.command):
    words = [x for x in stage.command[3:] if not x.startswith(("-n", "--junitxml"))]
    items = Items()
    pytest.main([*words, "--collect-only", "-qq"], plugins=[items])
    found[stage.name] = items.names
with open(sys.argv[1], "w") as file:
    json.dump(found, file)
"""


@pytest.mark.deep
def test_every_stage_of_tests_finds_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that no test has any more would only be noticed on a GPU."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import gpu_smoke

    folders = ("scripts", "python", ".")  # those of a call, and of its stages
    monkeypatch.setenv("PYTHONPATH", ":".join(str(ROOT / folder) for folder in folders))
    monkeypatch.chdir(ROOT)
    command = [sys.executable, "-c", COLLECT, str(tmp_path / "found.json")]
    subprocess.run(command, check=True, capture_output=True)
    found = json.loads((tmp_path / "found.json").read_text())
    assert [name for name, tests in found.items() if not tests] == []
    smoke = "tests/cuda/test_cuda_smoke.py::"
    assert found["gate"] == [f"{smoke}test_kernel[cuda-bfloat16 d128]"]
    corrected = {test.partition("[")[0].rpartition("::")[2] for test in found["corrected"]}
    assert corrected == {"test_kernel", "test_path_of_latents", "test_long_contexts"}
    kernels = {name for name in gpu_smoke.groups([smoke[:-2]]) if name.startswith("test_kernel ")}
    assert {"test_kernel bfloat16 d128", "test_kernel float16 latents of 40"} <= kernels


KERNELS = """
import os, time
import pytest

@pytest.mark.parametrize("kernel", ["bfloat16 d64", "float32 d96", "float32 d128"])
def test_kernel(kernel):
    if kernel == "float32 d96":
        time.sleep(50)
    if kernel == "float32 d128":
        os._exit(3)
"""


def test_each_kernel_has_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that hangs and one that ends its process fail alone."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import gpu_smoke

    monkeypatch.setattr(gpu_smoke, "LIMITS", ["--timeout", "2", "--timeout-method", "thread"])
    (tmp_path / "test_kernels.py").write_text(KERNELS)
    monkeypatch.chdir(tmp_path)
    assert gpu_smoke.main(["found.json", "test_kernels.py"]) == 1
    found = json.loads(Path("found.json").read_text())
    assert found.pop("test_kernel bfloat16 d64") == "passed"
    assert {*found.values()} == {"FAILED: status 1", "FAILED: status 3"}


LOST = """
import torch

def test_first(): pass

def test_breaks_the_device():
    def synchronize():
        raise RuntimeError("an illegal memory access was encountered")
    torch.cuda.is_initialized, torch.cuda.synchronize = lambda: True, synchronize
    raise AssertionError("the first error")

def test_last():
    assert not torch.cuda.is_initialized()
"""


def test_a_lost_device_fails_one_test(tmp_path: Path) -> None:
    """The worker that has lost it ends, and another one runs the tests that are left."""
    pytest.importorskip("xdist")
    (tmp_path / "test_device.py").write_text(LOST)
    options = ["-q", "-n1", "-p", "conftest", "-p", "no:cacheprovider", "test_device.py"]
    environment = {key: x for key, x in os.environ.items() if not key.startswith("PYTEST_")}
    environment["PYTHONPATH"] = f"{ROOT / 'tests'}:{ROOT / 'python'}:{ROOT}"
    command = [sys.executable, "-m", "pytest", *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert "1 failed, 2 passed" in done.stdout, done.stdout
    assert "test_breaks_the_device" in done.stdout and "the first error" in done.stderr
