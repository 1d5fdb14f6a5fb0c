# SPDX-License-Identifier: BSD-3-Clause
"""The build's choices, and what the distributions contain and require."""

import ast
import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import tree_attention
from package_copy import copy_package
from tiers import tiers
from tree_attention import __main__, _loader, hf

ROOT = Path(__file__).parents[2]

# Stands for torch, so that setup.py runs without importing the real one: prints what it is asked
# to build.
FAKE_TORCH = """
class version:
    cuda = {cuda!r}
class cuda:
    capabilities = {capabilities!r}
    @classmethod
    def device_count(cls):
        return len(cls.capabilities)
    @classmethod
    def get_device_capability(cls, i):
        return cls.capabilities[i]
__version__ = {version!r}
"""
FAKE_CPP_EXTENSION = """
import os
from setuptools import Extension
from setuptools.command.build_ext import build_ext as BuildExtension
CUDA_HOME = os.environ.get("CUDA_HOME")
class BuildExtension(BuildExtension):
    def build_extensions(self):
        command = "[1/2] c++ -MMD -I/a -c /a/csrc/ops.cpp -o /a/build/csrc/ops.o -std=c++20"
        os.system(f"echo '{command}'; echo csrc/ops.cpp:1: warning")
        if "FAILS" in os.environ:
            raise RuntimeError("Error compiling objects for extension")
def CppExtension(name, sources, extra_compile_args, **options):
    print("sources", *sources)
    print("flags", extra_compile_args, options["define_macros"])
    return Extension(name, sources, **options)
CUDAExtension = CppExtension
"""


@pytest.fixture
def run_setup(tmp_path):
    def run(
        *command,
        torch="2.15.0+cu132",
        cuda="13.2",
        nvcc="13.0",
        capabilities=(),
        source=ROOT,
        **variables,
    ):
        (tmp_path / "torch" / "utils").mkdir(parents=True)
        (tmp_path / "torch" / "__init__.py").write_text(
            FAKE_TORCH.format(version=torch, cuda=cuda, capabilities=capabilities)
        )
        (tmp_path / "torch" / "utils" / "__init__.py").touch()
        (tmp_path / "torch" / "utils" / "cpp_extension.py").write_text(FAKE_CPP_EXTENSION)
        if nvcc is not None:
            program = tmp_path / "cuda" / "bin" / "nvcc"
            program.parent.mkdir(parents=True)
            program.write_text(
                f"#!/bin/sh\necho 'Cuda compilation tools, release {nvcc}, V0' \"$@\"\n"
                'case "$FAILS_TO_COMPILE $*" in 1*-c*) exit 1 ;; esac\n'
            )
            program.chmod(0o755)
        ours = (
            "BUILD_EXTENSION",
            "USE_CUDA",
            "TORCH_CUDA_ARCH_LIST",
            "LINE_INFO",
            "DEBUG",
            "WGMMA",
        )
        environment = {k: v for k, v in os.environ.items() if k not in ours} | variables
        environment |= {"PYTHONPATH": str(tmp_path), "CUDA_HOME": str(tmp_path / "cuda")}
        return subprocess.run(
            [sys.executable, "setup.py", *(command or ("--name",))],
            cwd=source,
            env=environment,
            capture_output=True,
            text=True,
        )

    return run


def output(result):
    assert result.returncode == 0, result.stderr
    return result.stdout


def refusal(result):
    assert result.returncode == 1
    return result.stderr


def test_auto_takes_cuda_where_a_gpu_is_visible(run_setup):
    text = output(run_setup(capabilities=((9, 0),)))
    assert "torch 2.15.0+cu132, CUDA on (USE_CUDA=auto: nvcc 13.0, torch CUDA 13.2)" in text
    assert "csrc/cuda/merge/merge_states.cu" in text


def test_cuda_is_compiled_without_a_gpu_if_asked_for(run_setup):
    """As for images, which are built without one."""
    text = output(run_setup(USE_CUDA="1"))
    assert "CUDA on (USE_CUDA=1: nvcc 13.0, torch CUDA 13.2)" in text
    assert '"8.0;9.0+PTX"' in text, "also for GPUs that are newer than the compiler"


@pytest.mark.parametrize(
    ("machine", "reason"),
    tiers(
        [({"nvcc": None}, "nvcc was not found")],
        [
            ({"torch": "2.15.0+cpu", "cuda": None}, "torch 2.15.0+cpu was built without CUDA"),
            ({}, "no GPU is visible, without which USE_CUDA=1 compiles its kernels"),
            ({"nvcc": "12.8"}, "nvcc 12.8 and torch's CUDA 13.2 differ in major version"),
        ],
    ),
    ids=["no-nvcc", "cpu-torch", "no-gpu", "other-major"],
)
def test_without_cuda_auto_goes_on(run_setup, machine, reason):
    text = output(run_setup(**machine))
    assert f"CUDA off (USE_CUDA=auto: {reason}" in text
    assert ".cu" not in text.split("sources")[1].split("flags")[0]


def test_required_cuda_that_is_missing_stops_the_build(run_setup):
    assert "USE_CUDA=1, but nvcc was not found" in refusal(run_setup(nvcc=None, USE_CUDA="1"))


def test_zero_leaves_cuda_out(run_setup):
    assert "CUDA off (USE_CUDA=0)" in output(run_setup(USE_CUDA="0"))


def test_architectures_come_from_the_environment(run_setup):
    text = output(run_setup(USE_CUDA="1", TORCH_CUDA_ARCH_LIST="9.0a"))
    assert '"9.0a"' in text and "8.0" not in text


def test_architectures_are_those_of_visible_gpus(run_setup):
    text = output(run_setup(capabilities=((9, 0), (8, 0), (9, 0))))
    assert "'\"8.0;9.0\"'" in text


@pytest.mark.parametrize("line_info", ["0", "1"])
def test_kernels_are_small_unless_somebody_profiles_them(line_info, run_setup):
    text = output(run_setup(USE_CUDA="1", LINE_INFO=line_info))
    assert "--compress-mode=size" in text and ("-lineinfo" in text) == (line_info == "1")


def test_debug_turns_optimisation_off(run_setup):
    text = output(run_setup(USE_CUDA="1", DEBUG="1"))
    assert "-O0" in text and "-O3" not in text


def test_kernels_of_wgmma_are_optimised(run_setup):
    text = refusal(run_setup(USE_CUDA="1", DEBUG="1", WGMMA="1"))
    assert "WGMMA=1 needs optimised code, and DEBUG=1 has none: set one" in text


def build_with_wgmma(run_setup, tmp_path, **variables):
    command = "build_ext", "--build-lib", str(tmp_path), "--build-temp", str(tmp_path)
    return run_setup(*command, USE_CUDA="1", **variables)


def test_kernels_for_hopper_alone_are_not_compiled(run_setup, tmp_path):
    """No device has run them, and only the devices that they are for have their instructions."""
    assert "wgmma" not in output(build_with_wgmma(run_setup, tmp_path)).lower()


@pytest.mark.deep
def test_kernels_for_hopper_alone_are_compiled_if_asked_for(run_setup, tmp_path):
    text = output(build_with_wgmma(run_setup, tmp_path, WGMMA="1"))
    assert "TREE_ATTENTION_WGMMA" in text
    commands = [line for line in text.splitlines() if "-c build/instances/" in line]
    assert len(commands) == 6  # two dtypes of three heads
    for line in commands:
        assert "-gencode=arch=compute_90a,code=sm_90a" in line and "wgmma" in line


@pytest.mark.deep
def test_a_kernel_for_hopper_that_does_not_compile_is_named(run_setup, tmp_path):
    result = build_with_wgmma(run_setup, tmp_path, WGMMA="1", FAILS_TO_COMPILE="1")
    message = "nvcc failed for build/instances/lean_decode_wgmma_bf16_576.cu"
    assert message in refusal(result)


@pytest.mark.parametrize(
    "name", tiers(["USE_CUDA"], ["BUILD_EXTENSION", "LINE_INFO", "DEBUG", "WGMMA"])
)
def test_unknown_value_is_refused(run_setup, name):
    assert f"{name} must be one of" in refusal(run_setup(**{"USE_CUDA": "1", name: "yes"}))


@pytest.mark.parametrize("compiler", tiers([""], ["no-such-compiler", "no-such-launcher g++"]))
def test_a_build_without_a_compiler_says_so_last(compiler, run_setup, tmp_path):
    variables = {"CXX": compiler} if compiler else {"PATH": str(tmp_path)}
    command = "build_ext", "--build-lib", str(tmp_path), "--build-temp", str(tmp_path)
    last = refusal(run_setup(*command, USE_CUDA="0", **variables)).splitlines()[-1]
    assert last.startswith(f"tree_attention: no C++ compiler was found ({compiler or 'c++'}): apt")
    assert last.endswith("or name one of at least g++ 11, for example CXX=g++-12")


def build(run_setup, tmp_path, **variables):
    command = "--quiet", "build_ext", "--build-lib", tmp_path, "--build-temp", tmp_path
    return run_setup(*command, USE_CUDA="0", CXX="true", **variables)


@pytest.mark.deep
def test_a_build_shows_the_file_names_and_the_compiler_s_messages(run_setup, tmp_path):
    shown = output(build(run_setup, tmp_path)).splitlines()
    assert shown[-2:] == ["[1/2] csrc/ops", "csrc/ops.cpp:1: warning"]


def test_a_failed_build_ends_in_a_sentence(run_setup, tmp_path):
    result = build(run_setup, tmp_path, FAILS="1")
    assert "csrc/ops.cpp:1: warning" in result.stdout
    assert refusal(result) == (
        "tree_attention: Error compiling objects for extension: the compiler's messages are above\n"
    )


def with_sitecustomize(tmp_path, text):
    """What Python runs first in each process whose path begins with the folder."""
    (tmp_path / "sitecustomize.py").write_text(text)


def test_missing_headers_of_python_are_named(run_setup, tmp_path):
    of_none = "import sysconfig\nsysconfig.get_path = lambda name: '/nowhere'\n"
    with_sitecustomize(tmp_path, of_none)
    last = refusal(build(run_setup, tmp_path)).splitlines()[-1]
    assert last.startswith("tree_attention: Python's headers are missing (/nowhere/Python.h): apt")


def test_another_system_is_refused_before_torch_is_imported(run_setup, tmp_path):
    with_sitecustomize(tmp_path, "import sys\nsys.platform = 'darwin'\n")
    error = refusal(run_setup(torch="1.0"))  # which is not looked at
    assert error.startswith("tree_attention runs on Linux alone; on Windows install it in WSL 2")
    assert error.endswith("(this is darwin)\n") and error.count("\n") == 1


def test_an_older_python_is_refused_before_torch_is_imported(run_setup, tmp_path):
    """And not by the lack of a torch that there is none of."""
    with_sitecustomize(tmp_path, "import sys\nsys.version_info = (3, 9, 18)\n")
    error = refusal(run_setup(torch="1.0"))
    assert error.startswith("tree_attention needs Python 3.10 or newer, got ")
    assert error.count("\n") == 1


def test_other_systems_download_no_torch_for_the_sentence():
    text = (ROOT / "pyproject.toml").read_text()
    required = ast.literal_eval(re.search(r"^requires = (\[.*?\])$", text, re.M | re.S)[1])
    for system in ("darwin", "win32", "linux"):
        names = [x.name for x in map(Requirement, required) if holds(x, system)]
        assert names == ["setuptools"] + ["ninja", "torch"] * (system == "linux")


def holds(requirement: Requirement, system: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"sys_platform": system})


def test_missing_torch_is_named_with_the_command(run_setup, tmp_path):
    blocked = "import sys\nsys.modules['torch'] = None\n"
    with_sitecustomize(tmp_path, blocked)
    assert refusal(run_setup()).startswith("tree_attention: torch is not installed, against which")


@pytest.fixture(scope="module")
def without_torch(tmp_path_factory):
    """What BUILD_EXTENSION=0 installs where there is no torch, and the environment to run it in."""
    folder = tmp_path_factory.mktemp("without_torch")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        (folder / "source").mkdir(exist_ok=True)
        shutil.copy(ROOT / name, folder / "source" / name)
    copy_package(folder / "source" / "python")
    site = folder / "site"
    site.mkdir()
    (site / "torch.py").write_text("raise ModuleNotFoundError(\"No torch\", name='torch')\n")
    environment = os.environ | {"PYTHONPATH": str(site), "BUILD_EXTENSION": "0", "CXX": "none"}
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    options = ["--no-deps", "--no-build-isolation"]
    for command in (
        ["wheel", *options, "--wheel-dir", folder, folder / "source"],
        ["install", *options, "--target", site, folder / "source"],
    ):
        subprocess.run([*pip, *command], check=True, env=environment, cwd=folder)
    return folder, environment


@pytest.mark.deep
def test_plans_are_installed_without_torch_and_a_compiler(without_torch):
    folder, environment = without_torch
    (wheel,) = folder.glob("*.whl")
    assert wheel.name == f"tree_attention-{tree_attention.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as file:
        (metadata,) = (x for x in file.namelist() if x.endswith(".dist-info/METADATA"))
        lines = file.read(metadata).decode().splitlines()
    required = [Requirement(x.partition(": ")[2]) for x in lines if x.startswith("Requires-Dist")]
    assert [x.name for x in required if "extra" not in str(x.marker)] == ["numpy", "rich"]

    def run(*command):
        return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)

    program = folder / "site" / "bin" / "tree-attention"
    plan = [
        "plan",
        "--model",
        "llama-3.1-8b",
        "--context",
        "128k",
        "--ranks",
        "2",
        "--machine",
        "cpu",
    ]
    assert "Llama 3.1 8B" in output(run(program, *plan))
    page = output(run(sys.executable, ROOT / "scripts/site/estimate.py"))
    assert page.startswith("<!doctype html>") and '"llama-3.1-8b"' in page
    assert refusal(run(program, "verify")) == (
        "verify: torch is not installed, and the extension is not built: see Install in README.md\n"
    )


def test_metadata_need_no_compiler(run_setup, tmp_path):
    assert output(run_setup("--name", CXX="no-such-compiler")).endswith("tree-attention\n")


def test_too_old_torch_is_refused(run_setup):
    text = refusal(run_setup(torch="2.10.1+cpu"))
    assert "torch >= 2.11 is required, got 2.10.1+cpu" in text


def sources(result) -> list[str]:
    return output(result).split("sources ")[1].split("\n")[0].split()


def test_every_source_is_built(run_setup):
    """A file that setup.py forgets would be missing at run time only."""
    listed = sources(run_setup(USE_CUDA="1", WGMMA="1"))
    found = [
        str(path.relative_to(ROOT))
        for suffix in ("cpp", "cu")
        for path in (ROOT / "csrc").rglob(f"*.{suffix}")
    ]
    decode_kernels = [path for path in listed if path.startswith("build/instances/")]
    assert len(set(decode_kernels)) == 23 and all((ROOT / path).exists() for path in decode_kernels)
    assert sorted(set(listed) - set(decode_kernels)) == sorted(found)


@pytest.mark.deep
@pytest.mark.parametrize(
    ("torch", "cuda", "requirement"),
    [
        ("2.11.0", None, "torch<2.13,>=2.11"),
        ("2.12.1+cpu", None, "torch<2.13,>=2.11"),
        ("2.14.1", None, "torch<2.16,>=2.13"),
        ("2.15.0+cu132", "13.2", "torch<2.16,>=2.15"),
        ("2.99.0", None, "torch<2.100,>=2.99"),
    ],
)
def test_metadata_require_the_torch_that_the_extension_runs_with(
    run_setup, tmp_path, torch, cuda, requirement
):
    """The version is tagged as in scripts/wheels: two wheels for one Python need two names."""
    named = tmp_path / "named.cfg"
    named.write_text("[egg_info]\ntag_build = +torch2.1\n")
    made = run_setup(
        *("egg_info", "--egg-base", tmp_path),
        torch=torch,
        cuda=cuda,
        capabilities=((9, 0),),
        DIST_EXTRA_CONFIG=str(named),
    )
    first = requirement.split(">=")[1]
    assert f"TREE_ATTENTION_TORCH_RELEASES', '\"{first}" in output(made)
    lines = (tmp_path / "tree_attention.egg-info" / "PKG-INFO").read_text().splitlines()
    assert f"Version: {tree_attention.__version__}+torch2.1" in lines
    assert [line for line in lines if line.startswith("Requires-Dist: torch")] == [
        f"Requires-Dist: {requirement}"
    ]


@pytest.mark.parametrize("published", [True, False])
def test_metadata_name_author_licence_pages_and_command(run_setup, tmp_path, published):
    loader = "python/tree_attention/_loader.py"
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", loader):
        (tmp_path / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / "source" / name)
    address = "https://host/tree_attention/" if published else ""
    text = (tmp_path / "source" / loader).read_text()
    text, found = re.subn(r'^REPOSITORY = ".*"$', f'REPOSITORY = "{address}"', text, flags=re.M)
    assert found == 1
    (tmp_path / "source" / loader).write_text(text)
    output(run_setup("egg_info", "--egg-base", tmp_path, source=tmp_path / "source"))
    folder = tmp_path / "tree_attention.egg-info"
    head = (folder / "PKG-INFO").read_text().partition("\n\n")[0].splitlines()
    assert "Author: the tree_attention authors" in head
    assert "License-Expression: BSD-3-Clause" in head and "License-File: LICENSE" in head
    (keywords,) = (line for line in head if line.startswith("Keywords: "))
    assert {"decode context parallelism", "context sharding", "helix", "long context"} <= set(
        keywords.removeprefix("Keywords: ").split(",")
    )
    pages = {"Homepage": "", "Repository": ""}
    pages |= {"Documentation": "/tree/HEAD/docs", "Changelog": "/blob/HEAD/CHANGELOG.md"}
    found = [line for line in head if line.startswith("Project-URL: ")]
    expected = [f"Project-URL: {x}, https://host/tree_attention{page}" for x, page in pages.items()]
    assert found == expected * published
    points = (folder / "entry_points.txt").read_text()
    assert "[console_scripts]\ntree-attention = tree_attention.__main__:console\n" in points
    assert callable(__main__.console)


def test_table_of_tried_releases_is_what_setup_promises():
    """In docs/wheels.md pairs within a span work, and all others are refused."""
    spans = runpy.run_path(str(ROOT / "scripts" / "wheels"))["spans"]()
    text = (ROOT / "docs" / "wheels.md").read_text()
    lines = re.findall(r"^\|(.*)\|$", text.split("## Built with, run with")[1], re.MULTILINE)
    rows = [[cell.strip() for cell in line.split("|")] for line in lines]
    releases = [release for span in spans for release in span]
    table = {row[0]: row[1:] for row in rows if row[0] in releases}
    assert list(table) == releases and [row[1:] for row in rows].count(releases) == 1
    words = {True: set(), False: set()}
    for built, cells in table.items():
        for ran, cell in zip(releases, cells, strict=True):
            words[any(built in span and ran in span for span in spans)].add(cell)
    assert words == {True: {"works"}, False: {"refused"}}


def test_wheels_without_an_interpreter_are_refused(tmp_path):
    result = subprocess.run(
        [sys.executable, ROOT / "scripts" / "wheels", tmp_path / "out"],
        env=os.environ | {"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 2 and "name interpreters with --python" in result.stderr
    assert not (tmp_path / "out").exists()


def test_newest_tested_transformers_is_the_pinned_one():
    """And the pages name it, `info` and the errors of `generate` go by it."""
    tested, minimum = _loader.TESTED_TRANSFORMERS, _loader.MINIMUM_TRANSFORMERS
    requirements = (ROOT / "requirements.txt").read_text()
    assert f'\ntransformers=={tested} ; python_version >= "3.11"\n' in requirements
    release = tested.rpartition(".")[0]
    page = (ROOT / "docs" / "models.md").read_text()
    assert f"| transformers ≥ {minimum}, tested up to {release}," in page
    assert f"5.23 and {release}." in (hf.__doc__ or "")


def test_environments_of_other_engines_are_not_distributed():
    """They are gigabytes, in a folder that is."""
    lines = (ROOT / ".gitignore").read_text().splitlines()
    ignored = [line.strip("/") for line in lines if line.startswith("/benchmarks/")]
    rules = (ROOT / "MANIFEST.in").read_text().splitlines()
    assert ignored and all(f"prune {folder}" in rules for folder in ignored)
    grafted = rules.index("graft benchmarks")
    assert all(rules.index(f"prune {folder}") > grafted for folder in ignored)


@pytest.mark.deep
def test_source_distribution_is_complete(tmp_path):
    commands = f"--quiet egg_info --egg-base {tmp_path} sdist --dist-dir {tmp_path}"
    subprocess.run(
        [sys.executable, "setup.py", *commands.split()],
        cwd=ROOT,
        env=os.environ | {"USE_CUDA": "0"},
        check=True,
        capture_output=True,
    )
    (archive,) = tmp_path.glob(f"tree_attention-{tree_attention.__version__}.tar.gz")
    with tarfile.open(archive) as file:
        contained = {name.partition("/")[2] for name in file.getnames()}
    needed = {
        str(path.relative_to(ROOT))
        for folder, pattern in [
            ("csrc", "*"),
            ("python", "*.py"),
            ("conformance", "*"),
            ("benchmarks", "*.py"),
        ]
        for path in (ROOT / folder).rglob(pattern)
        if path.is_file() and not {"__pycache__", ".environments"} & {*path.parts}
    }
    needed |= {"setup.py", "pyproject.toml", "LICENSE", "README.md", "CHANGELOG.md"}
    needed |= {"python/tree_attention/py.typed"}
    assert needed <= contained, needed - contained
    assert not {name for name in contained if name.endswith((".so", ".o", ".pyc", ".png", ".svg"))}
    assert not {name for name in contained if name.startswith("benchmarks/results")}
    assert archive.stat().st_size < 6e6


@pytest.mark.deep
def test_benchmarks_are_not_installed(tmp_path):
    subprocess.run(
        [sys.executable, "setup.py", "--quiet", "build_py", "--build-lib", tmp_path],
        cwd=ROOT,
        env=os.environ | {"USE_CUDA": "0"},
        check=True,
        capture_output=True,
    )
    assert [path.name for path in tmp_path.iterdir()] == ["tree_attention"]
    installed = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.py")}
    ours = {str(path.relative_to(ROOT / "python")) for path in (ROOT / "python").rglob("*.py")}
    kit = ROOT / "conformance" / "tree_attention_conformance"
    ours |= {f"tree_attention/reference/conformance/{path.name}" for path in kit.glob("*.py")}
    assert installed == ours and "tree_attention/reference/conformance/check.py" in ours
