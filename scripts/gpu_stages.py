# SPDX-License-Identifier: BSD-3-Clause
"""The stages of scripts/gpu_check.sh, in the order of what each is worth."""

import os
from dataclasses import dataclass

# Of ten minutes, so that nobody else ends the call while it writes.
SECONDS = 585


@dataclass(frozen=True)
class Stage:
    name: str
    seconds: int  # it is ended after so long, or with the time of the call
    # {python}, {capability} (as in sm_90), {results} (a folder), {budget}: the seconds in which it
    # should begin all that it times.
    command: tuple[str, ...]
    needs: tuple[str, ...] = ("a GPU", "build", "gate")
    least: int = 5  # seconds, of those that are left of the call, with which it is worth beginning


# One step after the other; the stages of a step side by side.
Steps = tuple[tuple[Stage, ...], ...]


def pytest(name: str, seconds: int, *arguments: str, workers: int = 1, needs=Stage.needs) -> Stage:
    """A stage of tests, in workers: pytest-xdist replaces one that hangs or has lost the device. A
    signal would not interrupt a wait for the device."""
    options = ("-v", "-p", "no:cacheprovider", "--timeout", "60", "--timeout-method", "thread")
    report = f"--junitxml={{results}}/{name}.xml"
    command = ("{python}", "-m", "pytest", *options, f"-n{workers}", report, *arguments)
    return Stage(name, seconds, command, needs)


def files(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/cuda/test_cuda_{name}.py" for name in names)


def bash(script: str, *arguments: str) -> tuple[str, ...]:
    return ("bash", "-c", script, *arguments)


# What these words name compiles emulators or asks no GPU.
ON_DEVICE = " and not ".join(
    ("cuda", "emulat", "any_order", "old_architectures", "rings_of_all_depths", "shared_memory")
)
# With the compiler or the profiler.
SLOW = "compiled or one_kernel or three_kernels"
# In processes of its own, which load kernels and allocate memory during a capture.
FIRST_CALLS = "first_calls"

# What no device but one of 9.0 has is in its architecture with an "a".
PTX = """
sm=${0/#90/90a}
nvcc -std=c++20 -O1 -gencode=arch=compute_$sm,code=sm_$sm -Icsrc -Itests/cpp \
  tests/cuda_emulator/ptx_on_device.cu -o "$1" && "$1"
"""
# Also the headers without which nothing can be compiled.
MACHINE = """
nvidia-smi; nvidia-smi -q -d CLOCK,PERFORMANCE; nvcc --version; g++ --version; ncu --version
compute-sanitizer --version; nproc; free -g; "$0" --version; "$0" -m pip list
"$0" -c 'import sysconfig; print(sysconfig.get_paths()["include"])' | xargs -I{} ls {}/Python.h
find -L "${CUDA_HOME:-/usr/local/cuda}/include" -maxdepth 1 -name cuda_runtime.h
"$0" -c 'import torch; torch.cuda.init(); print(torch.cuda.get_device_properties(0))'
"""
# Registers and memory of every kernel go into the log.
EXTENSION = """
"$0" -m tree_attention info
cuobjdump --dump-resource-usage python/tree_attention/_C*.so
XZ_OPT=-T0 tar -cJf "$1/extension.tar.xz" python/tree_attention/_C*.so build/gpu_check.stamp \
  $(ls build/ablations/*/*.so)
"""
PROFILE = """
ncu --clock-control none --profile-from-start off --set full -f -o "$1/profile" \
  "$0" -m benchmarks.cuda.profile &&
"$0" -m benchmarks.cuda.profile --read "$1/profile.ncu-rep" --out "$1"
"""
# Another build, with the kernels by wgmma, or WGMMA_EXTENSION in its place; then their tests, and
# the rows that may take them with it and without.
WGMMA = """
if [[ $1 != 90 ]]; then echo "these kernels are for compute capability 9.0"; exit 77; fi
tree=$PWD/build/wgmma
mkdir -p "$tree/python" && cp -r csrc "$tree" && cp -r python/tree_attention "$tree/python"
find . -maxdepth 1 -type f -exec cp {} "$tree" ";"
rm -f "$tree"/python/tree_attention/_C*.so
if [[ -f ${WGMMA_EXTENSION:-} ]]; then
  cp "$WGMMA_EXTENSION" "$tree/python/tree_attention"
else
  (cd "$tree" && WGMMA=1 "$0" setup.py build_ext --inplace) || exit 1
fi
with=$tree/python:${PYTHONPATH:-}
PYTHONPATH=$with "$0" -m pytest -v -p no:cacheprovider -o "pythonpath=. tests" --timeout 60 \
  --timeout-method thread "--junitxml=$2/wgmma.xml" -k "not emulated" "$3" || exit 1
rows() {
  PYTHONPATH=$1 "$0" benchmarks/decode.py --device cuda --seconds 0.3 --only d576/512 q=8 q=16 \
    --out "$2"
}
rows "$with" "$2/with_wgmma" && rows "${PYTHONPATH:-}" "$2/without_wgmma"
"""
# Builds the ablations, unless built ones came with EXTENSION.
BUILD_ABLATIONS = """
if [[ -n ${EXTENSION:-} ]] && ls build/ablations/*/tree_attention_ablations.so; then exit; fi
"$0" -m benchmarks.cuda.ablations
"""
PEERS = os.environ.get("PEERS", "").split()
WITH_PEERS = ("--peers", *PEERS) if PEERS else ()
OUT = ("--out", "{results}")
DECODE = ("{python}", "benchmarks/decode.py", "--device", "cuda", *WITH_PEERS)
# Some compile their kernels at the first call, which is not to take the time of the benchmark.
PEERS_ALONE = (*DECODE, "--quick", "--only", "B=1 1k", "d64 B=1", "--out", "{results}/peers")
LOST_DEVICE = ("{python}", "-m", "benchmarks.cuda.lost_device", *WITH_PEERS, *OUT)
# The host has a part of the work, with all its threads.
FAR_KEYS = ("env", "-u", "OMP_NUM_THREADS", "{python}", "-m", "benchmarks.cuda.far_keys", *OUT)
STAMPS = ("{python}", "-m", "benchmarks.cuda.stamps", *OUT)
# A case takes three seconds or so, and one that has begun is ended.
TUNE = ("{python}", "-m", "benchmarks.cuda.tune", "--seconds", "1", "--budget", "{budget}", *OUT)
SMOKE = files("smoke")
SMOKE_COMMAND = ("{python}", "scripts/gpu_smoke.py", "{results}/smoke.json", *SMOKE)
NUMERICS = files("numerics")
LAUNCHES = files("launches", "graphs", "workspace")
OPERATORS = tuple(
    f"tests/ops/test_{name}.py"
    for name in (
        *("lean_decode", "lean_decode_out", "merge_states", "append_kv", "several_ranges"),
        *("decode_rounding", "append_kv_errors", "op_compile", "cascade_decode"),
    )
)
OTHERS = (
    *("tests/test_patterns.py", "tests/test_positions.py", "tests/reference/test_conformance.py"),
    *("tests/benchmarks/test_bench_cuda_timing.py", "tests/benchmarks/test_bench_cuda_cases.py"),
)

COMPILE = ("{python}", "setup.py", "build_ext", "--inplace", "--force")
BUILD = Stage("build", 145, COMPILE, needs=("a GPU",))
WITH_ABLATIONS = (*Stage.needs, "ablations")
# One kernel, on which all others depend; the smoke test is of all kernels.
GATE = pytest(
    "gate", 60, "-k", "test_kernel and bfloat16 and d128 and not int8 and not float8 and not emul",
    *SMOKE, needs=("a GPU", "build"),
)  # fmt: skip
# Tests of what failed on a GPU and was corrected since.
CORRECTED = (
    "latents and (test_kernel or test_path) and not emul or test_long_contexts and 128k and float32"
)

STAGES: Steps = (
    (Stage("machine", 30, bash(MACHINE, "{python}"), ()),),
    (
        BUILD,
        Stage("ptx", 60, bash(PTX, "{capability}", "{results}/../ptx_on_device"), ("a GPU",)),
        Stage("ablations", 145, bash(BUILD_ABLATIONS, "{python}"), ("a GPU",)),
    ),
    (GATE,),
    # Nothing is timed yet.
    (
        pytest("corrected", 90, "-k", CORRECTED, *SMOKE, *NUMERICS),
        Stage("lost_device", 100, LOST_DEVICE),
        Stage("peers", 100, PEERS_ALONE),
    ),
    (Stage("stamps", 60, STAMPS, WITH_ABLATIONS),),
    (Stage("benchmark", 120, (*DECODE, "--quick", "--budget", "{budget}", *OUT)),),
    (Stage("profile", 60, bash(PROFILE, "{python}", "{results}")),),
    (Stage("extension", 30, bash(EXTENSION, "{python}", "{results}"), ("build",)),),
    (Stage("smoke", 150, SMOKE_COMMAND),),
    (pytest("launches", 120, "-k", f"not ({SLOW} or {FIRST_CALLS})", *LAUNCHES),),
    (pytest("first_calls", 60, "-k", FIRST_CALLS, *files("graphs")),),
    (
        Stage("wgmma", 330, bash(WGMMA, "{python}", "{capability}", "{results}", *files("wgmma")),
              least=60 if "WGMMA_EXTENSION" in os.environ else 180),
    ),
    # What is left of the first call, and of others.
    (
        pytest("8_bits", 120, "-k", ON_DEVICE, *files("8_bit_keys"), workers=4),
        pytest("shapes", 90, "-k", ON_DEVICE, *files("shapes", "latents"), workers=4),
        pytest("operators", 120, "-k", ON_DEVICE, *OPERATORS, workers=4),
    ),
    (
        pytest("errors", 45, "-k", ON_DEVICE, *files("errors", "ptx"), workers=4),
        pytest("numerics", 90, *NUMERICS),
    ),
    (Stage("tune_cuda", 90, TUNE, WITH_ABLATIONS),),
    (Stage("far_keys_cuda", 120, FAR_KEYS, least=60),),
    # Virtual ranks that wait for one another are alone on the device.
    (pytest("one_shot", 45, "-k", ON_DEVICE, "tests/exchange/test_one_shot.py"),),
    (
        pytest("huggingface", 180, *files("huggingface", "static_cache")),
        pytest("more_graphs", 90, "-k", SLOW, *files("graphs", "ranges")),
        pytest("others", 60, "-k", ON_DEVICE, *OTHERS, workers=4),
    ),
    (pytest("ranks", 250, *files("ranks")),),
    (Stage("all_rows", 400, (*DECODE, "--full", "--budget", "{budget}", *OUT), least=120),),
    (Stage("sanitizer", 300, ("env", "SANITIZER_SECONDS={budget}", "scripts/sanitize_cuda.sh"),
           least=120),),
)  # fmt: skip
# These are there in every call.
NEEDED = {name for step in STAGES for stage in step for name in stage.needs}
