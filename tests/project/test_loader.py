# SPDX-License-Identifier: BSD-3-Clause
"""What a user reads when the compiled extension is missing or belongs to another installation."""

import os
import re
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest
import torch

from package_copy import copy_package
from tiers import tiers
from tree_attention import _loader
from tree_attention.__main__ import COMMANDS

ROOT = Path(__file__).parents[2]
SUFFIX = EXTENSION_SUFFIXES[0]
VERSION = torch.__version__.split("+")[0]
RELEASE = ".".join(VERSION.split(".")[:2])


def write_extension(
    directory: Path, torch_version: str, releases: str = RELEASE, suffix: str = SUFFIX
) -> None:
    """A file that carries the version marker of an extension and cannot be loaded."""
    marker = f"\0tree_attention is built for torch {torch_version} and runs with {releases}\0"
    (directory / f"_C{suffix}").write_bytes(marker.encode().ljust(4096))


def message(directory: Path) -> str:
    with pytest.raises(ImportError) as info:
        _loader.load_from(directory)
    return str(info.value)


def test_missing_extension_names_file_and_command(tmp_path):
    text = message(tmp_path)
    assert f"the extension is missing: no _C{SUFFIX} in {tmp_path}" in text
    assert text.endswith("setup.py build_ext --inplace")


def test_extension_of_another_python_is_named(tmp_path):
    write_extension(tmp_path, torch.__version__, suffix=".cpython-39-x86_64-linux-gnu.so")
    text = message(tmp_path)
    assert f"built for another Python: _C{SUFFIX} is needed, _C.cpython-39-x86_64-linux" in text


def test_extension_of_another_torch_names_both_versions(tmp_path):
    write_extension(tmp_path, "1.0.0+cpu", "1.0, 1.1")
    text = message(tmp_path)
    assert "built for torch 1.0.0+cpu and runs with 1.0, 1.1, but torch" in text
    assert f"but torch {torch.__version__} is installed" in text
    assert text.endswith("setup.py build_ext --inplace")


def test_extension_of_a_neighbouring_release_is_loaded(tmp_path):
    """It gets as far as the system's loader, which refuses the file for what it holds."""
    write_extension(tmp_path, "1.0.0", f"1.0, {RELEASE}, 9.9")
    assert "invalid ELF header" in message(tmp_path)


def test_release_must_be_named_in_full(tmp_path):
    write_extension(tmp_path, "1.0.0", f"1.0, {RELEASE}0, 1{RELEASE}")
    assert f"runs with 1.0, {RELEASE}0, 1{RELEASE}, but torch" in message(tmp_path)


def test_other_flavour_of_the_same_torch_is_named_when_it_does_not_load(tmp_path):
    write_extension(tmp_path, f"{VERSION}+other")
    text = message(tmp_path)
    assert f"built for torch {VERSION}+other and runs with {RELEASE}, but torch" in text
    assert "invalid ELF header" in text


def test_damaged_extension_gives_the_loader_s_reason(tmp_path):
    write_extension(tmp_path, torch.__version__)
    assert re.search(r"does not load: .*invalid ELF header.* Rebuild it: ", message(tmp_path))


def test_extension_without_a_version_is_refused(tmp_path):
    (tmp_path / f"_C{SUFFIX}").write_bytes(b"not ELF")
    text = message(tmp_path)
    assert "built for torch unknown and runs with unknown releases, but torch" in text


def test_rebuild_command_outside_a_checkout_uses_pip(tmp_path, monkeypatch):
    monkeypatch.setattr(_loader, "PACKAGE", tmp_path / "site-packages" / "tree_attention")
    assert "pip install --no-build-isolation --no-deps --force-reinstall" in message(tmp_path)


def test_real_extension_carries_the_versions_it_was_built_for():
    extension = _loader.load()
    built_for, releases = _loader.torch_versions_of(_loader.PACKAGE / f"_C{SUFFIX}")
    assert built_for == extension.build_info()["torch_version"]
    assert ".".join(built_for.split(".")[:2]) in releases.split(", ")


def test_real_extension_has_no_symbol_that_changed_between_interchangeable_releases():
    """torch 2.12 renamed two of 2.11's; a build on either must find what it calls in both."""
    data = (_loader.PACKAGE / f"_C{SUFFIX}").read_bytes()
    assert b"const_data_ptrI" not in data, "TensorBase::const_data_ptr<T>(): see elements()"
    assert b"5torch7Library4_defE" not in data, "Library::def(): see STABLE_TORCH_LIBRARY"


@pytest.mark.deep
def test_process_holds_one_openmp_runtime():
    """A second runtime would double the threads: torch's own and ours."""
    program = """
import torch, tree_attention
from tree_attention.cli.information import openmp_runtimes
q, k = torch.randn(1, 8, 1, 64), torch.randn(1, 8, 4096, 64)
tree_attention.lean_decode(q, k, k)
torch.nn.functional.scaled_dot_product_attention(q, k, k)
print(*openmp_runtimes(), sep="\\n")
"""
    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        cwd=_loader.PACKAGE.parent,
    )
    runtimes = result.stdout.split()
    assert len(runtimes) == 1, runtimes
    assert Path(torch.__file__).resolve().parent in Path(runtimes[0]).parents


def python(*arguments: object, path: Path = _loader.PACKAGE.parent, **variables: str):
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(path), str(ROOT)])} | variables,
    )


def without(module: str, tmp_path: Path) -> Path:
    """A folder of the package beside which `module` is not installed."""
    error = f'raise ModuleNotFoundError("No module named {module!r}", name="{module}")\n'
    (tmp_path / f"{module}.py").write_text(error)
    copy_package(tmp_path)
    return tmp_path


PLAN = ("plan", "--model", "llama-3.1-8b", "--context", "128k", "--ranks", "2", "--machine", "h100")
MODEL = f"{ROOT}/examples/passkey-llama"


def test_plans_versions_and_help_need_no_torch(tmp_path):
    path = without("torch", tmp_path)
    result = python("-m", "tree_attention", *PLAN, path=path)
    assert result.returncode == 0, result.stderr
    assert "Llama 3.1 8B" in result.stdout and "tensor parallel" in result.stdout
    for option in ("--version", "--help"):
        result = python("-m", "tree_attention", option, path=path)
        assert result.returncode == 0 and result.stdout and not result.stderr
    for command in COMMANDS:
        result = python("-m", "tree_attention", command, "--help", path=path)
        assert result.returncode == 0 and "examples:" in result.stdout, result.stderr
    tables = "import sys; sys.path.insert(0, 'scripts/site'); import estimate; estimate.tables()"
    result = python("-c", tables, path=path)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("module", "command", "message"),
    tiers(
        [
            ("torch", ("verify",), "verify: torch is not installed. Run: pip install torch"),
            ("numpy", PLAN, "plan: numpy is not installed. Run: pip install numpy"),
            (
                "rich",
                PLAN,
                "tree_attention: No module named 'rich'. Every command needs: pip install",
            ),
        ],
        [
            (
                "torch",
                (*PLAN, "--calibration", "x"),
                "plan: torch is not installed. Run: pip install",
            ),
            (
                "transformers",
                ("plan", "--model", MODEL, *PLAN[3:]),
                f"plan: --model: {MODEL}: tree_attention.hf needs transformers >= 5.5: pip install",
            ),
        ],
    ),
)
def test_commands_name_the_library_that_they_lack(module, command, message, tmp_path):
    result = python("-m", "tree_attention", *command, path=without(module, tmp_path))
    assert result.returncode == 1 + (module == "transformers") and result.stderr.startswith(
        message
    ), result.stderr
    assert result.stderr.count("\n") == 1 and not result.stdout


def test_a_package_for_plans_alone_names_the_whole_installation(tmp_path):
    path = without("torch", tmp_path)
    for extension in (path / "tree_attention").glob("_C*"):
        extension.unlink()
    result = python("-m", "tree_attention", "info", path=path)
    assert result.returncode == 1 and not result.stdout
    assert result.stderr == (
        "info: torch is not installed, and the extension is not built: see Install in README.md\n"
    )


@pytest.fixture
def not_built(tmp_path):
    """A copy of the package without its extension."""
    copy = copy_package(tmp_path)
    for extension in copy.glob("_C*"):
        extension.unlink()
    return tmp_path


@pytest.mark.deep
def test_what_needs_no_extension_runs_where_none_is_built(not_built):
    program = """
import torch, tree_attention
from tree_attention import BlockCyclic, reference
from tree_attention.reference.conformance import check_merge
assert "lean_decode" in dir(tree_attention) and not hasattr(tree_attention, "lean_decodes")
assert check_merge(reference.merge_states).passed and BlockCyclic
for name in ("lean_decode", "_C"):
    try:
        getattr(tree_attention, name)
    except ImportError as error:
        print(error)
"""
    result = python("-c", program, path=not_built)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("tree_attention: the extension is missing: no _C") == 2
    assert python("-m", "tree_attention", *PLAN, path=not_built).returncode == 0


@pytest.mark.deep
@pytest.mark.parametrize("command", ["generate", "info", "verify"])
def test_commands_say_in_a_sentence_that_the_extension_is_missing(command, not_built):
    model = ["--model", str(ROOT / "examples/passkey-llama"), "--prompt", "a"]
    arguments = model if command == "generate" else []
    result = python("-m", "tree_attention", command, *arguments, path=not_built)
    assert result.returncode == 1 and result.stderr.count("\n") == 1, result.stderr
    assert result.stderr.startswith(f"{command}: tree_attention: the extension is missing")


@pytest.mark.parametrize("order", tiers(["0"], ["1"]))
def test_an_import_loads_nothing_until_a_name_is_used(order):
    """And each name is found, whichever is used first, once."""
    program = """
import sys, tree_attention
assert not {"torch", "numpy", "rich", "tree_attention.ops"} & set(sys.modules)
names = tree_attention.__all__
for name in names if sys.argv[1] == "0" else reversed(names):
    assert getattr(tree_attention, name) is vars(tree_attention)[name], name
from tree_attention import *
from tree_attention import _C
assert _C is sys.modules["tree_attention._C"]
assert lean_decode is tree_attention.ops.lean_decode
assert tree_attention.exchange.all_merge_states is all_merge_states
"""
    result = python("-c", program, order)
    assert result.returncode == 0, result.stderr


@pytest.mark.deep
def test_operators_are_those_of_torch_once_both_are_imported():
    program = "import torch, tree_attention; print(torch.ops.tree_attention.lean_decode)"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "tree_attention.lean_decode" in found.stdout, found.stderr
