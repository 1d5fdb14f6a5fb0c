# SPDX-License-Identifier: BSD-3-Clause
"""Commands on several ranks that are late, lost, interrupted or unlike each other: every rank ends
in time, with one sentence and no traceback."""

import re
import signal
import socket
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from distributed import AMPLE_SECONDS
from ranks_of_commands import Ended, Ranks, started
from tiers import tiers
from tree_attention.__main__ import main
from tree_attention.cli import world
from tree_attention.cli.usage import UsageError
from tree_attention.exchange import ExchangeError

pytest.importorskip("transformers")

INTERRUPTED = "generate: interrupted; all ranks end\n"
SHOWN = "Prompt (1 tokens): a\n"
# Ends long after whatever a test does to the ranks.
ENDLESS = ("--prompt", "a", "--max-new-tokens", "8000")
# Runs a command on a rank that dies once it has met the others.
DIES_WHILE_IT_LOADS = """
import os, sys
from tree_attention.__main__ import end, main
from tree_attention.cli import checkpoint
if os.environ["RANK"] == "1":
    checkpoint.load_tokenizer = lambda path: os._exit(7)
end(main(sys.argv[1:]))
"""


def generate(checkpoint: Path, *arguments: str) -> list[str]:
    return ["generate", "--model", str(checkpoint), *arguments]


def in_generation(ranks: Ranks) -> None:
    """Returns when the ranks generate: text is shown up to its last space."""
    ranks.wait_for_output(0, " ")


def assert_one_sentence(ended: Ended) -> None:
    for sign in ("Traceback", "frame #", "Exception raised from"):
        assert sign not in ended.stderr, ended.stderr
    assert ended.stderr.count("generate: ") <= 1


@pytest.mark.deep
@pytest.mark.parametrize(
    ("present", "sentence"),
    [
        (1, "rank 1 of 2: the ranks did not meet .* have 2 s: rank 0, which serves .*; start"),
        (0, "rank 0 of 2: the ranks did not meet .* have 2 s: no word from rank 1; start all 2"),
    ],
)
def test_a_rank_that_never_comes(checkpoint: Path, present: int, sentence: str) -> None:
    """torch alone would wait for half an hour."""
    arguments = generate(checkpoint, *ENDLESS, "--timeout", "2")
    with started(arguments, only=[present], rank_0_serves=True, own_interpreter=True) as ranks:
        ended = ranks.wait_for_end(0)
    assert ended.status == 1
    assert re.search(f"^generate: {sentence}", ended.stderr), ended.stderr
    assert_one_sentence(ended)


@pytest.mark.deep
def test_a_rank_lost_while_it_loads(checkpoint: Path) -> None:
    """The first agreement waits for as long as --timeout says, whatever the library's default."""
    arguments = generate(checkpoint, *ENDLESS, "--timeout", "30")  # also to start
    with started(arguments, program=DIES_WHILE_IT_LOADS) as ranks:
        assert ranks.wait_for_end(1).status == 7
        ended = ranks.wait_for_end(0)
    assert ended.status == 1
    assert "no answer within 30 s: no word from rank 1" in ended.stderr, ended.stderr
    assert "Start all ranks again." in ended.stderr and "is lost" not in ended.stderr
    assert_one_sentence(ended)


@pytest.mark.deep
def test_a_rank_lost_in_generation(checkpoint: Path) -> None:
    """Rank 0 takes the store with it, of which torch's log would say more than our sentence."""
    arguments = generate(checkpoint, *ENDLESS, "--timeout", str(4 * AMPLE_SECONDS))
    with started(arguments, rank_0_serves=True, own_interpreter=True) as ranks:
        in_generation(ranks)
        ranks.send(signal.SIGKILL, 0)
        ended = ranks.wait_for_end(1)
    assert ended.status == 1
    assert ended.stderr.startswith("generate: rank 1 of 2: "), ended.stderr  # which shows no prompt
    assert "A part of the cache is lost with the rank that held it: start all" in ended.stderr
    assert_one_sentence(ended)


def test_ranks_with_different_arguments(checkpoint: Path) -> None:
    arguments = generate(checkpoint, *ENDLESS, "--timeout", str(4 * AMPLE_SECONDS))
    with started(arguments, arguments_of_last=("--max-new-tokens", "7999")) as ranks:
        for rank in range(2):
            ended = ranks.wait_for_end(rank)
            assert ended.status == 1
            assert (
                "generation setting max_new_tokens is 7999 on rank 1, 8000 on rank 0. "
                "Nothing is lost: start all ranks again, alike." in ended.stderr
            ), ended.stderr
            assert_one_sentence(ended)


@pytest.mark.deep
@pytest.mark.parametrize(
    "interrupted", [(0, 1), *(pytest.param((rank,), marks=pytest.mark.deep) for rank in range(2))]
)
def test_ctrl_c(checkpoint: Path, interrupted: tuple[int, ...]) -> None:
    arguments = generate(checkpoint, *ENDLESS, "--timeout", str(4 * AMPLE_SECONDS))
    with started(arguments) as ranks:
        in_generation(ranks)
        ranks.send(signal.SIGINT, *interrupted)
        ended = [ranks.wait_for_end(rank) for rank in range(2)]
    assert [end.status for end in ended] == [130, 130], ended
    assert ended[0].stderr == SHOWN + INTERRUPTED and ended[1].stderr == ""


def test_ctrl_c_on_a_rank_that_no_other_meets(checkpoint: Path) -> None:
    arguments = generate(checkpoint, *ENDLESS, "--timeout", str(4 * AMPLE_SECONDS))
    with started(arguments, only=[0], rank_0_serves=True) as ranks:
        ranks.wait_for_store()
        time.sleep(0.5)  # until it waits for the other
        ranks.send(signal.SIGINT, 0)
        ended = ranks.wait_for_end(0)
    assert (ended.status, ended.stderr) == (130, INTERRUPTED)


@pytest.mark.deep
def test_ctrl_c_on_a_process_alone(checkpoint: Path) -> None:
    with started(generate(checkpoint, *ENDLESS), world_size=1) as ranks:
        in_generation(ranks)
        ranks.send(signal.SIGINT, 0)
        ended = ranks.wait_for_end(0)
    assert (ended.status, ended.stderr) == (130, SHOWN + INTERRUPTED)


@pytest.mark.deep
def test_ctrl_c_on_a_rank_that_waits_for_another(checkpoint: Path) -> None:
    """It waits in C++, where Python's own handler would not come to run before the deadline."""
    arguments = generate(checkpoint, *ENDLESS, "--timeout", str(4 * AMPLE_SECONDS))
    with started(arguments) as ranks:
        in_generation(ranks)
        ranks.send(signal.SIGSTOP, 1)
        time.sleep(2.0)  # until it waits
        ranks.send(signal.SIGINT, 0)
        ended = ranks.wait_for_end(0)
    assert (ended.status, ended.stderr) == (130, SHOWN + INTERRUPTED)


@pytest.mark.parametrize(
    "content",
    [
        None,
        "[",
        '{"format": 3, "backend": "gloo"}',
        '{"format": 3, "backend": "gloo", "nodes": [0, 1], "exchanges": '
        '[{"strategy": "all_gather", "num_bytes": -1024, "seconds": 0.25}]}',
    ],
)
def test_a_table_of_costs_that_cannot_be_read(
    content: str | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = tmp_path / "costs.json"
    if content is not None:
        table.write_text(content)
    monkeypatch.setenv("TREE_ATTENTION_COSTS", str(table))
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")  # which keeps the threads of this process
    (tmp_path / "config.json").touch()
    for command in ("generate", "verify"):
        arguments = ["--model", str(tmp_path), "--prompt", "a"] if command == "generate" else []
        assert main([command, *arguments]) == 2
        error = capsys.readouterr().err
        names = "must be unset or name a file that calibrate wrote"
        got = f"got {str(table)!r}: table of exchange costs {table}"
        assert error.startswith(f"{command}: TREE_ATTENTION_COSTS {names}, {got}")
        assert "write a new one with" in error and error.count("\n") == 1


def test_ranks_without_all_that_torchrun_sets(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise each of them would be a world of one, whose checks pass."""
    for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert main(["verify"]) == 2
    assert capsys.readouterr().err == (
        "verify: RANK is set without LOCAL_RANK, MASTER_ADDR, MASTER_PORT: start the ranks with "
        "torchrun, or unset RANK to run one process\n"
    )


def first_rank_of(world_size: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make this process the only one that starts; return the port where it waits."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    variables = {"RANK": "0", "WORLD_SIZE": str(world_size), "LOCAL_RANK": "0"}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "3"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return port


@pytest.mark.deep
def test_a_rank_says_for_whom_it_waits(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world, "_SILENT_SECONDS", 0.2)
    port = first_rank_of(3, monkeypatch)
    error = pytest.raises(ExchangeError, match="no word from ranks 1, 2; start all 3 ranks")
    with error, world.joined_world(timeout=3.0):
        pass
    assert capsys.readouterr().err == (
        f"rank 0 of 3: waits at 127.0.0.1:{port} for ranks 1, 2, 3 s in all\n"
    )


@pytest.mark.parametrize("given", [None, 12.0])
def test_ranks_have_longer_to_start_than_to_answer(
    given: float | None, monkeypatch: pytest.MonkeyPatch, checkpoint: Path
) -> None:
    """Unless --timeout gives them the same for both."""
    waits: list[float | None] = []

    @contextmanager
    def joined(backend: str, timeout: float | None, group_timeout: float) -> Iterator[None]:
        waits.extend((timeout, group_timeout))
        yield

    @contextmanager
    def taking_part(arguments: Namespace, of_world: None, device: object) -> Iterator[None]:
        waits.append(arguments.timeout)
        raise UsageError("they have met")
        yield

    monkeypatch.setattr(world, "joined_world", joined)
    monkeypatch.setattr("tree_attention.cli.generate.taking_part", taking_part)
    options = [] if given is None else ["--timeout", str(given)]
    assert main(generate(checkpoint, "--prompt", "a", *options)) == 2
    assert waits == [given, *([30.0] * 2 if given is None else [given] * 2)]


@pytest.mark.parametrize("command", tiers(["verify"], ["calibrate"]))
def test_the_time_to_wait_is_an_option(
    command: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)  # where calibrate would write
    port = first_rank_of(2, monkeypatch)
    assert main([command, "--timeout", "0.5"]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"{command}: rank 0 of 2: the ranks did not meet at 127.0.0.1:{port}")
    assert "have 0.5 s: no word from rank 1; start all 2 ranks" in error
    assert main([command, "--timeout", "0"]) == 2
    assert "--timeout must be above 0 and at most" in capsys.readouterr().err


def test_calibration_needs_no_readable_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An unreadable table may be why somebody calibrates."""
    monkeypatch.setenv("TREE_ATTENTION_COSTS", str(tmp_path / "nothing"))
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    assert main(["calibrate", "--out", str(tmp_path / "costs.json")]) == 2
    assert "RANK is set without MASTER_ADDR" in capsys.readouterr().err  # which is checked next
