# SPDX-License-Identifier: BSD-3-Clause
"""Variables of clusters, launchers and templates that cannot be used: each is named, at once."""

import os
from pathlib import Path

import pytest
import torch

from tree_attention.__main__ import main
from tree_attention._environment import VariableError, read_integer
from tree_attention.cli.world import choose_device, joined_world
from tree_attention.exchange.transport.topology import node_name
from tree_attention.vllm import checks

# What torchrun gives the only rank of a world of one.
ALONE = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
    "OMP_NUM_THREADS": "3",  # which keeps the threads of this process
}
OF_TWO = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "29500"}
PORT = "MASTER_PORT must be an integer from {} to 65535, got '{}'"
SIZE = "{} must be an integer from 1 to {}, got '{}'"
HOST = "MASTER_ADDR must be the name or the address of rank 0's host, got "
WRONG = [
    ({"MASTER_PORT": "tcp://10.96.3.7:29500"}, PORT.format(0, "tcp://10.96.3.7:29500")),
    ({"MASTER_PORT": ""}, PORT.format(0, "")),
    ({"MASTER_PORT": "99999999"}, PORT.format(0, "99999999")),
    ({"MASTER_PORT": "-4"}, PORT.format(0, "-4")),
    ({"MASTER_PORT": "29500.0"}, PORT.format(0, "29500.0")),
    ({"MASTER_PORT": "2_9"}, PORT.format(0, "2_9")),
    ({"MASTER_PORT": "٢٩"}, PORT.format(0, "٢٩")),
    ({"MASTER_PORT": "9" * 5000}, PORT.format(0, "9" * 5000)),
    ({**OF_TWO, "MASTER_PORT": "0"}, PORT.format(1, "0")),
    ({"RANK": ""}, "RANK must be 0, got ''"),
    ({"RANK": "-1"}, "RANK must be 0, got '-1'"),
    ({"RANK": "5"}, "RANK must be 0, got '5'"),
    ({**OF_TWO, "RANK": "2"}, "RANK must be an integer from 0 to 1, got '2'"),
    ({"WORLD_SIZE": "two"}, SIZE.format("WORLD_SIZE", 1 << 20, "two")),
    ({"WORLD_SIZE": "0"}, SIZE.format("WORLD_SIZE", 1 << 20, "0")),
    ({"WORLD_SIZE": ""}, SIZE.format("WORLD_SIZE", 1 << 20, "")),
    ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE must be 1, got '0'"),
    ({"LOCAL_WORLD_SIZE": ""}, "LOCAL_WORLD_SIZE must be 1, got ''"),
    ({**OF_TWO, "LOCAL_WORLD_SIZE": "3"}, SIZE.format("LOCAL_WORLD_SIZE", 2, "3")),
    ({"LOCAL_RANK": "x"}, "LOCAL_RANK must be 0, got 'x'"),
    ({**OF_TWO, "LOCAL_RANK": "2"}, "LOCAL_RANK must be an integer from 0 to 1, got '2'"),
    ({"MASTER_ADDR": ""}, HOST + "''"),
    ({"MASTER_ADDR": "a..b"}, HOST + "'a..b': "),
    ({"MASTER_ADDR": "tcp://10.96.3.7"}, HOST + "'tcp://10.96.3.7': "),
    ({"MASTER_ADDR": "no-such-host.invalid"}, HOST + "'no-such-host.invalid': "),
    ({"TREE_ATTENTION_COSTS": "/"}, "must be unset or name a file that calibrate wrote, got '/': "),
    ({"TREE_ATTENTION_COSTS": "/no/x"}, "got '/no/x': table of exchange costs /no/x: No such file"),
]


@pytest.fixture
def set_variables(monkeypatch: pytest.MonkeyPatch):
    def set_variables(**variables: str) -> None:
        for name, value in (ALONE | variables).items():
            monkeypatch.setenv(name, value)

    monkeypatch.setattr("tree_attention.cli.world._NAME_SECONDS", 0.6)
    return set_variables


@pytest.mark.parametrize(("variables", "sentence"), WRONG, ids=lambda x: str(x)[:40])
def test_a_variable_that_cannot_be_used(
    variables: dict[str, str],
    sentence: str,
    set_variables,
    capsys: pytest.CaptureFixture[str],
) -> None:
    set_variables(**variables)
    assert main(["verify"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("verify: ") and sentence in error and error.count("\n") == 1


@pytest.mark.parametrize("command", ["generate", "calibrate", "verify"])
def test_every_command_says_so(
    command: str,
    set_variables,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    set_variables(MASTER_PORT="tcp://10.96.3.7:29500")
    (tmp_path / "config.json").touch()
    arguments = ["--model", ".", "--prompt", "a"] if command == "generate" else []
    assert main([command, *arguments]) == 2
    assert capsys.readouterr().err == f"{command}: {PORT.format(0, 'tcp://10.96.3.7:29500')}\n"


def test_variables_without_a_rank_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubernetes sets MASTER_PORT in every container beside a service called master."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("MASTER_PORT", "tcp://10.96.3.7:29500")
    with joined_world() as world:
        assert world.size == 1


def test_right_variables(set_variables) -> None:
    set_variables()
    with joined_world(timeout=30.0) as world:
        assert (world.rank, world.size, world.local_rank) == (0, 1, 0)
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("name", ["LOCAL_RANK", "LOCAL_WORLD_SIZE"])
def test_the_device_of_a_rank(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "one")
    with pytest.raises(VariableError, match=f"{name} must be .*, got 'one'"):
        choose_device("auto")


def test_the_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("A_NUMBER", raising=False)
    assert read_integer("A_NUMBER", 1, 3, 2) == 2
    with pytest.raises(VariableError, match="A_NUMBER must be an integer from 1 to 3, and is not"):
        read_integer("A_NUMBER", 1, 3)
    monkeypatch.setenv("A_NUMBER", "3")
    assert read_integer("A_NUMBER", 1, 3, 2) == 3


@pytest.mark.parametrize(
    "variables",
    [
        {"LOCAL_WORLD_SIZE": "9" * 5000},
        {"LOCAL_WORLD_SIZE": "two"},
        {"LOCAL_WORLD_SIZE": "0"},
        {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "9" * 5000},
    ],
)
def test_an_engine_may_set_variables_for_itself(
    variables: dict[str, str], set_variables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node's name is then the host's; the engine's own use is not in the way."""
    set_variables()
    with joined_world(timeout=30.0):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        assert node_name().startswith(os.uname().nodename + "/")


@pytest.mark.parametrize("value", ["yes", "2", " 1"])
def test_the_plug_in_of_vllm(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(checks.VARIABLE, value)
    with pytest.raises(VariableError, match=f"{checks.VARIABLE} must be 1, 0 or unset, got"):
        checks.is_asked_for()
    monkeypatch.setenv(checks.CASCADE_VARIABLE, value)
    with pytest.raises(VariableError, match=f"{checks.CASCADE_VARIABLE} must be 1, 0 or unset"):
        checks.is_cascade()
