# SPDX-License-Identifier: BSD-3-Clause
"""`python -m tree_attention info` and the dispatch of commands."""

import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys

import pytest
import torch

from tree_attention import __main__, __version__, _loader
from tree_attention._loader import TESTED_TRANSFORMERS
from tree_attention.cli import information


@pytest.mark.deep
def test_info_prints_what_is_used():
    result = subprocess.run(
        [sys.executable, "-m", "tree_attention", "info"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(_loader.PACKAGE.parent), "COLUMNS": "200"},
    )
    assert result.returncode == 0, result.stderr
    rows = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
    assert rows["tree_attention"].startswith(__version__)
    assert rows["torch"].startswith(torch.__version__)
    assert rows["threads"].startswith(f"{torch.get_num_threads()};")
    assert result.stdout.count(_loader.load().cpu_instruction_set()) >= 1
    # As in a report of a bug: every row on a line, which ends where its words end.
    names = [line.partition("  ")[0] for line in result.stdout.splitlines()]
    rows = zip(names, information.rows(), strict=True)
    assert all(name.startswith(row) for name, (row, _) in rows)
    assert all(line == line.rstrip() for line in result.stdout.splitlines())


def test_info_of_a_rank_says_whose_it_is(monkeypatch):
    assert "rank" not in dict(information.rows())
    monkeypatch.setenv("RANK", "3")
    assert dict(information.rows())["rank"] == f"3, on {platform.node()}"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("cpu family\t: 26\nmodel\t\t: 2\nmodel name\t: EPYC\n\n", "EPYC (family 26, model 2)"),
        ("model name\t: Core \n", "Core"),
        ("cpu family\t: 6\nmodel name\t: Core\n", "Core"),
        ("CPU part\t: 0xd40\n", platform.processor() or platform.machine()),
    ],
)
def test_name_of_a_cpu_tells_its_generation(tmp_path, text, name):
    (tmp_path / "cpuinfo").write_text(text)
    assert information.cpu_name(tmp_path / "cpuinfo") == name
    assert information.cpu_name(tmp_path / "none") == (platform.processor() or platform.machine())


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        __main__.main(["--version"])
    assert capsys.readouterr().out == f"{__version__}\n"


@pytest.mark.deep
@pytest.mark.parametrize(
    ("output", "status", "error"),
    [
        ("> /dev/full", 1, "info: cannot go on: [Errno 28] No space left on device\n"),
        (">&-", 0, ""),
        ("2>&-", 0, ""),
    ],
)
def test_output_that_cannot_be_written(output, status, error):
    result = subprocess.run(
        ["sh", "-c", f"{sys.executable} -m tree_attention info {output}"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(_loader.PACKAGE.parent)},
    )
    assert (result.returncode, result.stderr) == (status, error)


@pytest.mark.parametrize("command", __main__.COMMANDS)
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as exit_info:
        __main__.main([command, "--help"])
    assert exit_info.value.code == 0
    shown = capsys.readouterr().out
    assert f"usage: python -m tree_attention {command}" in shown
    examples = [line for line in shown.partition("example")[2].splitlines() if line[:1] == " "]
    assert any(f" {command}" in example for example in examples)


def test_the_command_is_called_as_it_was_started(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/tree-attention", "plan", "--help"])
    with pytest.raises(SystemExit):
        __main__.main(["plan", "--help"])
    shown = capsys.readouterr().out
    assert shown.startswith("usage: tree-attention plan ") and "python" not in shown


def test_unknown_command_lists_the_known_ones(capsys):
    with pytest.raises(SystemExit) as exit_info:
        __main__.main(["inform"])
    assert exit_info.value.code == 2
    error = capsys.readouterr().err
    assert all(command in error for command in __main__.COMMANDS)


def test_cuda_kernels_name_compiler_and_architectures():
    assert information.cuda_kernels("13.0", "8.0;9.0a") == "built by nvcc 13.0 for 8.0;9.0a"


def test_cuda_kernels_that_are_not_built_name_the_command():
    assert information.cuda_kernels(None, None).startswith(
        "not built. Where nvcc is installed: export USE_CUDA=1; "
    )


def test_torch_without_cuda_is_the_reason_for_no_device(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert information.cuda_devices().endswith("is built without CUDA")


def test_devices_that_are_too_old_are_marked(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", ["NVIDIA H200", "Tesla T4"].__getitem__)
    monkeypatch.setattr(torch.cuda, "get_device_capability", [(9, 0), (7, 5)].__getitem__)
    expected = "NVIDIA H200 (sm_90), Tesla T4 (sm_75, too old: kernels need sm_80)"
    assert information.cuda_devices() == expected


def test_missing_driver_is_the_reason_for_no_device(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert information.cuda_devices() == "unavailable: torch finds no CUDA driver or no device"


def test_devices_are_named_with_their_architecture(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert information.cuda_devices() == "H200 (sm_90)"


def test_missing_backend_is_named(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert information.nccl() == f"unavailable: torch {torch.__version__} is built without it"


def test_missing_transformers_names_the_extra(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert information.transformers() == "not installed: pip install 'transformers>=5.5'"


@pytest.mark.parametrize(
    "version,clause",
    [
        (TESTED_TRANSFORMERS, ""),
        ("5.5.0", ""),
        ("5.99.0", f", newer than the newest tested ({TESTED_TRANSFORMERS})"),
    ],
)
def test_an_untested_transformers_is_said_to_be_so(monkeypatch, version, clause):
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    assert information.transformers() == version + clause


def test_old_transformers_names_the_requirement(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "5.4.1")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    assert information.transformers().startswith("5.4.1 is too old: >= 5.5 is required")
