# SPDX-License-Identifier: BSD-3-Clause
"""The conformance kit as others get it: a wheel without a compiler or torch, and a plug-in."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tree_attention
from tree_attention.reference import conformance
from tree_attention.reference.conformance import plugin

KIT = Path(__file__).parents[2] / "conformance"
ENGINE = """
import numpy as np

def merge(o_parts, lse_parts):
    assert isinstance(o_parts, np.ndarray)
    largest = lse_parts.max(0)
    largest = np.where(largest == -np.inf, 0, largest)
    weights = np.exp(lse_parts - largest)
    total = weights.sum(0)
    with np.errstate(divide="ignore"):
        lse = np.log(total) + largest
    weights /= np.where(total == 0, 1, total)
    empty = (lse_parts == -np.inf)[..., None]
    o = np.where(empty, 0, weights[..., None] * o_parts.astype(np.float32)).sum(0)
    return o.astype(o_parts.dtype), lse

def multiply(o_parts, lse_parts):
    o, lse = merge(o_parts, lse_parts)
    return o + 0 * o_parts.astype(np.float32).sum(0), lse

def nothing(o_parts, lse_parts):
    pass

def decode(problem):
    raise NotImplementedError("no shards")
"""
# Stands for a Python without torch.
WITHOUT_TORCH = "raise ImportError('torch is not installed')"


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with the installed wheel and an engine, without torch."""
    folder = tmp_path_factory.mktemp("kit")
    source = shutil.copytree(KIT, folder / "source")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    options = ["--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "wheel", *options, "--wheel-dir", folder, source], check=True)
    (wheel,) = folder.glob("*.whl")
    assert wheel.name == f"tree_attention_conformance-{conformance.__version__}-py3-none-any.whl"
    site = folder / "site"
    subprocess.run([*pip, "install", "--no-deps", "--target", site, wheel], check=True)
    (site / "engine.py").write_text(ENGINE)
    (site / "torch.py").write_text(WITHOUT_TORCH)
    (site / "test_engine.py").write_text("def test_engine(): pass\n")
    return site


def run_pytest(installed, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", *arguments],
        cwd=installed,
        env=os.environ | {"PYTHONPATH": str(installed), "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
    )


def test_versions_are_the_same():
    assert conformance.__version__ == tree_attention.__version__


@pytest.mark.deep
def test_a_merge_passes_without_torch(installed):
    result = run_pytest(installed, "--merge", "engine:merge", "--conformance-parts", "4")
    assert result.returncode == 0 and "9 passed" in result.stdout, result.stdout


@pytest.mark.deep
def test_the_program_of_the_page_runs_without_torch(installed):
    (program,) = re.findall(r"```python\n(.*?)```", (KIT / "README.md").read_text(), re.DOTALL)
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=installed,
        env=os.environ | {"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    *cases, passed = result.stdout.splitlines()
    assert passed == "True" and len(cases) == 9
    assert all(line.startswith("ok ") for line in cases)


@pytest.mark.deep
def test_a_wrong_merge_is_told(installed):
    """In the lines that the kit's own page shows."""
    result = run_pytest(installed, "--merge", "engine:multiply", "--decode", "engine:decode")
    assert result.returncode == 1
    assert "1 failed, 8 passed, 13 skipped" in result.stdout, result.stdout
    case = "o of an empty part is uninitialised"
    assert f"FAILED engine:multiply::{case}" in result.stdout
    page = (KIT / "README.md").read_text()
    sentence = re.search(rf"FAILED +{case}: .*\n +(.*)", page)[1]
    assert f"\n{sentence}\n{case}: o nan (bound" in result.stdout


@pytest.mark.deep
def test_the_summary_begins_with_what_is_wrong(installed):
    """One failure is shown in full, and of the others in which one they are told."""
    result = run_pytest(installed, "--merge", "engine:nothing")
    assert result.returncode == 1 and "9 failed" in result.stdout, result.stdout
    details, summary = result.stdout.split("short test summary info")
    assert details.count("None was returned") == 1
    assert details.count("\nas in the first case\n") == 8
    assert "FAILED engine:nothing::ordinary parts - return (o, lse)" in summary


@pytest.mark.deep
def test_the_second_of_two_plug_ins_steps_aside(installed):
    """A copy stands for tree_attention's own, which `-p` loads before that of the wheel."""
    copy = installed / "reference_conformance"
    shutil.copytree(installed / "tree_attention_conformance", copy)
    result = run_pytest(installed, "-p", "reference_conformance.plugin", "--merge", "engine:merge")
    assert result.returncode == 0 and "9 passed" in result.stdout, result.stderr


@pytest.mark.deep
def test_own_tests_run_beside_the_cases_where_they_are_named(installed):
    beside = run_pytest(installed, "test_engine.py", "--merge", "engine:merge")
    assert "10 passed" in beside.stdout


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("math", "--merge: must be MODULE:FUNCTION, got 'math'"),
        ("math:none", "--merge math:none: module 'math' has no attribute 'none'"),
        ("nothing:merge", "--merge nothing:merge: No module named 'nothing'"),
        ("raising:merge", "--merge raising:merge: KeyError: 'table'"),
        (
            "eng/mymerge.py:f",
            "--merge: MODULE is a name as `import` takes it, no path, got 'eng/mymerge.py': "
            "--merge eng.mymerge:f",
        ),
        (
            "/a/eng/mymerge.py:f",
            "--merge: MODULE is a name as `import` takes it, no path, got '/a/eng/mymerge.py': "
            "--merge mymerge:f with pytest started in /a/eng",
        ),
    ],
)
def test_a_function_that_is_not_there_is_refused(target, message, tmp_path):
    (tmp_path / "raising.py").write_text("{}['table']")
    with pytest.raises(pytest.UsageError, match=f"^{re.escape(message)}$"):
        plugin._imported("merge", target, str(tmp_path))
