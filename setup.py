# SPDX-License-Identifier: BSD-3-Clause
"""Builds `tree_attention._C`. Everything that is not compiled is in pyproject.toml.

Environment: BUILD_EXTENSION=0|1, USE_CUDA=auto|0|1, TORCH_CUDA_ARCH_LIST, MAX_JOBS, LINE_INFO=0|1,
DEBUG=0|1, WGMMA=0|1 (CONTRIBUTING.md).
"""

import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

if sys.version_info < (3, 10):  # noqa: UP036, as pip runs this before it reads requires-python
    sys.exit(
        f"tree_attention needs Python 3.10 or newer, got {sys.version.split()[0]}: make the "
        "environment with a newer one, for example `python3.12 -m venv .venv`"
    )


def flag(name: str, default: str, allowed: tuple[str, ...]) -> str:
    value = os.environ.get(name, default)
    if value not in allowed:
        sys.exit(f"tree_attention: {name} must be one of {', '.join(allowed)}, got {value!r}")
    return value


# Plans need none, and no torch.
BUILD_EXTENSION = flag("BUILD_EXTENSION", "1", ("0", "1")) == "1"
if BUILD_EXTENSION:
    if sys.platform != "linux":
        sys.exit(
            "tree_attention runs on Linux alone; on Windows install it in WSL 2, on a Mac in a "
            f"Linux container or virtual machine (this is {sys.platform})"
        )
    try:
        import torch
    except ModuleNotFoundError:
        sys.exit(
            "tree_attention: torch is not installed, against which the extension is compiled. Run: "
            "pip install 'torch>=2.11' 'setuptools>=77,<82' ninja"
        )
    from torch.utils.cpp_extension import CUDA_HOME, BuildExtension, CppExtension, CUDAExtension
else:
    from setuptools.command.build_ext import build_ext as BuildExtension
from setuptools import setup  # noqa: E402

CPU_SOURCES = [
    "csrc/experts/multiply.cpp",
    "csrc/experts/operator.cpp",
    "csrc/experts/rows.cpp",
    "csrc/experts/rows_avx2.cpp",
    "csrc/experts/rows_avx512.cpp",
    "csrc/experts/rows_avx512_bf16.cpp",
    "csrc/experts/rows_neon.cpp",
    "csrc/experts/rows_portable.cpp",
    "csrc/experts/unpack.cpp",
    "csrc/ops.cpp",
    "csrc/module.cpp",
    "csrc/schedule.cpp",
    "csrc/args/append.cpp",
    "csrc/args/cascade.cpp",
    "csrc/args/decode.cpp",
    "csrc/args/index.cpp",
    "csrc/args/memory_overlap.cpp",
    "csrc/args/merge.cpp",
    "csrc/args/ranges.cpp",
    "csrc/cpu/append.cpp",
    "csrc/cpu/decode.cpp",
    "csrc/cpu/digest.cpp",
    "csrc/cpu/index/index_topk.cpp",
    "csrc/cpu/index/merge_topk.cpp",
    "csrc/cpu/index/scores.cpp",
    "csrc/cpu/index/scores_avx2.cpp",
    "csrc/cpu/index/scores_avx512.cpp",
    "csrc/cpu/index/scores_avx512_bf16.cpp",
    "csrc/cpu/index/scores_neon.cpp",
    "csrc/cpu/index/scores_portable.cpp",
    "csrc/cpu/instruction_set.cpp",
    "csrc/cpu/merge.cpp",
    "csrc/cpu/ranges.cpp",
    "csrc/cpu/shared_memory.cpp",
    "csrc/cpu/sockets.cpp",
    "csrc/cpu/sum_rows.cpp",
    "csrc/cpu/amx/decode_amx.cpp",
    "csrc/cpu/vector/decode_avx2.cpp",
    "csrc/cpu/vector/decode_avx512.cpp",
    "csrc/cpu/vector/decode_neon.cpp",
    "csrc/cpu/bf16/decode_avx512_bf16.cpp",
    "csrc/cpu/neon/decode_neon_bf16.cpp",
    "csrc/cpu/vector/decode_portable.cpp",
    "csrc/cpu/merge_rows.cpp",
    "csrc/cpu/quantise_row.cpp",
]
CUDA_SOURCES = [  # and those that csrc/cuda/decode/instances.py writes
    "csrc/cuda/ops_cuda.cpp",
    "csrc/cuda/checks.cpp",
    "csrc/cuda/decode/launch.cu",
    "csrc/cuda/decode/plan.cu",
    "csrc/cuda/decode/check_pages.cu",
    "csrc/cuda/decode/workspaces.cpp",
    "csrc/cuda/append/append_kv.cu",
    "csrc/cuda/merge/merge_states.cu",
    "csrc/cuda/ranges/split_ranges.cu",
    "csrc/cuda/one_shot/one_shot.cu",
    "csrc/cuda/one_shot/one_shot_args.cpp",
]
WGMMA_SOURCES = ["csrc/cuda/decode/wgmma_launch.cu"]  # and those with wgmma in their names
DEFAULT_CUDA_ARCHITECTURES = "8.0;9.0+PTX"  # A100; H100, H200; whatever is newer
REQUIREMENTS = ["numpy", "rich>=13"]  # and torch, where there is the extension
MINIMUM_TORCH = (2, 11)
# Releases of torch between which an extension without CUDA may move: docs/wheels.md has the proof.
INTERCHANGEABLE_TORCH = (("2.11", "2.12"), ("2.13", "2.14", "2.15"))


def nvcc_version() -> str | None:
    """Version of the nvcc that torch's build helper would run; None without one."""
    nvcc = os.path.join(CUDA_HOME or "", "bin", "nvcc")
    if not os.path.exists(nvcc):
        return None
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    match = re.search(r"release (\d+\.\d+)", text)
    return match.group(1) if match else None


def choose_cuda() -> bool:
    """Whether to build the CUDA kernels, which takes minutes: for a visible GPU, or if asked."""
    choice, nvcc = flag("USE_CUDA", "auto", ("auto", "0", "1")), nvcc_version()
    missing = []
    if nvcc is None:
        missing.append("nvcc was not found (set CUDA_HOME or PATH)")
    if torch.version.cuda is None:
        missing.append(f"torch {torch.__version__} was built without CUDA")
    elif nvcc is not None and nvcc.split(".")[0] != torch.version.cuda.split(".")[0]:
        missing.append(f"nvcc {nvcc} and torch's CUDA {torch.version.cuda} differ in major version")
    if choice == "1" and missing:
        sys.exit(f"tree_attention: USE_CUDA=1, but {'; '.join(missing)}")
    if choice == "auto" and not missing and not torch.cuda.device_count():
        missing.append("no GPU is visible, without which USE_CUDA=1 compiles its kernels")
    use_cuda = choice != "0" and not missing
    reason = f"nvcc {nvcc}, torch CUDA {torch.version.cuda}" if use_cuda else "; ".join(missing)
    print(
        f"tree_attention: building for torch {torch.__version__},",
        f"CUDA {'on' if use_cuda else 'off'} (USE_CUDA={choice}{reason and ': '}{reason})",
        flush=True,
    )
    return use_cuda


class Build(BuildExtension):
    """torch's, which ends in a traceback and shows command lines of a thousand characters."""

    def build_extensions(self) -> None:
        check_tools()
        try:
            with objects_shown():
                for extension in self.extensions:
                    extension.extra_objects += compile_wgmma(*getattr(extension, "wgmma", ((), ())))
                super().build_extensions()
        except RuntimeError as error:
            sys.exit(f"tree_attention: {error}: the compiler's messages are above")


def compile_wgmma(sources: Sequence[str], flags: Sequence[str]) -> list[str]:
    """The objects of sources for compute capability 9.0 alone: their instructions are not in PTX
    for later GPUs, and torch's helper compiles all sources for the same GPUs."""
    objects = []
    for source in sources:
        objects.append(f"{source}.o")
        nvcc = os.path.join(CUDA_HOME, "bin", "nvcc")
        architecture = "-gencode=arch=compute_90a,code=sm_90a"
        command = [nvcc, *flags, architecture, "-Icsrc", "-Xcompiler=-fPIC"]
        print(f"{source} (compute capability 9.0)", flush=True)
        if subprocess.run([*command, "-c", source, "-o", objects[-1]]).returncode != 0:
            raise RuntimeError(f"nvcc failed for {source}")
    return objects


def check_tools() -> None:
    """Ends the build in a sentence where a compiler or Python's headers are missing."""
    compiler = os.environ.get("CXX") or "c++"  # what torch runs
    if shutil.which(shlex.split(compiler)[0]) is None:
        sys.exit(
            f"tree_attention: no C++ compiler was found ({compiler}): apt install g++ on "
            "Debian and Ubuntu, or name one of at least g++ 11, for example CXX=g++-12"
        )
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists():
        sys.exit(
            f"tree_attention: Python's headers are missing ({header}): apt install python3-dev on "
            "Debian and Ubuntu, or take another Python"
        )


@contextmanager
def objects_shown() -> Iterator[None]:
    """Of a compiler's command line only the object is shown, as progress; its messages stay."""
    short = r"s@^(\[[0-9]+/[0-9]+\]) .* -o [^ ]*/((csrc|instances)/[^ ]*)\.o .*@\1 \2@"
    with subprocess.Popen(["sed", "-u", "-E", short], stdin=subprocess.PIPE) as sed:
        sys.stdout.flush()
        stdout = os.dup(1)
        os.dup2(sed.stdin.fileno(), 1)
        try:
            yield
        finally:
            sys.stdout.flush()
            os.dup2(stdout, 1)
            os.close(stdout)


def cuda_architectures() -> str:
    """The compute capabilities of the visible GPUs, else of all GPUs that the kernels are for."""
    count = torch.cuda.device_count()
    found = {"{}.{}".format(*torch.cuda.get_device_capability(i)) for i in range(count)}
    return ";".join(sorted(found)) or DEFAULT_CUDA_ARCHITECTURES


def torch_releases(use_cuda: bool) -> tuple[str, ...]:
    """The releases of torch that the extension runs with: metadata and extension name them."""
    own = ".".join(torch.__version__.split(".")[:2])
    spans = (span for span in INTERCHANGEABLE_TORCH if own in span and not use_cuda)
    return next(spans, (own,))


def torch_requirement(releases: tuple[str, ...]) -> str:
    major, minor = releases[-1].split(".")
    return f"torch>={releases[0]},<{major}.{int(minor) + 1}"


def project_urls() -> dict[str, str]:
    """Pages of the repository, if it is published."""
    address = runpy.run_path("python/tree_attention/_loader.py")["REPOSITORY"].rstrip("/")
    pages = {
        "Homepage": "",
        "Repository": "",
        "Documentation": "/tree/HEAD/docs",
        "Changelog": "/blob/HEAD/CHANGELOG.md",
    }
    return {name: address + page for name, page in pages.items()} if address else {}


def extension(use_cuda: bool):
    debug = flag("DEBUG", "0", ("0", "1")) == "1"
    optimisation = ["-O0", "-g", "-UNDEBUG"] if debug else ["-O3", "-g1"]
    macros = [
        ("TREE_ATTENTION_TORCH_VERSION", f'"{torch.__version__}"'),
        ("TREE_ATTENTION_TORCH_RELEASES", f'"{", ".join(torch_releases(use_cuda))}"'),
    ]
    # -fopenmp is for the compiler only, so that at::parallel_for, which is inlined here, forks
    # threads. The linker does not get it: libgomp's symbols come from the copy that torch ships,
    # and a process never holds two OpenMP runtimes.
    # No -ffast-math: infinities are part of the contract. Contraction is spelled with fma.
    cxx = [*optimisation, "-std=c++20", "-fopenmp", "-ffp-contract=off", "-fvisibility=hidden"]
    # Python's own flags say -fwrapv, which costs the CPU kernel 3 % where keys lie in a cache.
    cxx += ["-fno-wrapv", "-Wall", "-Wextra", "-Wno-unused-parameter"]
    if not use_cuda:
        return CppExtension(
            "tree_attention._C",
            CPU_SOURCES,
            include_dirs=[os.path.abspath("csrc")],
            define_macros=macros,
            extra_compile_args={"cxx": cxx},
        )
    architectures = os.environ.setdefault("TORCH_CUDA_ARCH_LIST", cuda_architectures())
    macros += [
        ("TREE_ATTENTION_WITH_CUDA", None),
        ("TREE_ATTENTION_CUDA_VERSION", f'"{nvcc_version()}"'),
        ("TREE_ATTENTION_CUDA_ARCHITECTURES", f'"{architectures}"'),
    ]
    # -fmad=false is -ffp-contract=off: products and sums are fused only where the text says so, and
    # a merge has the same bits in every kernel.
    nvcc = ["-std=c++20", "-fmad=false", *(["-O0", "-g", "-G"] if debug else ["-O3"])]
    if tuple(map(int, nvcc_version().split("."))) >= (12, 8):
        nvcc += ["--compress-mode=size"]
    if flag("LINE_INFO", "0", ("0", "1")) == "1":
        nvcc += ["-lineinfo"]
    written = runpy.run_path("csrc/cuda/decode/instances.py")
    folder = Path("build/instances")
    instances = written["write_instances"](folder, written["instances"]())
    sources = [*map(str, instances), *CPU_SOURCES, *CUDA_SOURCES]
    with_wgmma = flag("WGMMA", "0", ("0", "1")) == "1"
    if with_wgmma and debug:  # accumulators in memory would be read before they are there
        sys.exit("tree_attention: WGMMA=1 needs optimised code, and DEBUG=1 has none: set one")
    if with_wgmma:
        macros.append(("TREE_ATTENTION_WGMMA", None))
        sources += WGMMA_SOURCES
    extension = CUDAExtension(
        "tree_attention._C",
        sources,
        include_dirs=[os.path.abspath("csrc")],
        define_macros=macros,
        extra_compile_args={"cxx": cxx, "nvcc": nvcc},
    )
    if with_wgmma:
        units = written["write_instances"](folder, written["wgmma_instances"]())
        extension.wgmma = ([str(unit) for unit in units], nvcc)
    return extension


def compiled() -> dict[str, object]:
    """What the extension adds to the distribution."""
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < MINIMUM_TORCH:
        sys.exit(f"tree_attention: torch >= 2.11 is required, got {torch.__version__}")
    use_cuda = choose_cuda()
    return {
        "ext_modules": [extension(use_cuda)],
        "cmdclass": {"build_ext": Build},
        "install_requires": [torch_requirement(torch_releases(use_cuda)), *REQUIREMENTS],
    }


setup(
    project_urls=project_urls(),
    **(compiled() if BUILD_EXTENSION else {"install_requires": REQUIREMENTS}),
)
