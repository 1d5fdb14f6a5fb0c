# SPDX-License-Identifier: BSD-3-Clause
"""`generate --shares`: parts by numbers, by measured speed, and processes that are left out."""

import json
import signal
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from ranks_of_commands import Ended, started
from tiers import tiers
from tree_attention import ExchangeError
from tree_attention.__main__ import main
from tree_attention.cli import shares
from unequal_hosts import costs_of, hosts

PROMPT = "Keys and values never move." * 8


def generate(
    checkpoint: Path, folder: Path, *options: str, serves: bool = False, world_size: int = 2
) -> list[Ended]:
    """Processes that say what one says, as far as they are not left out."""
    model = "--model", str(checkpoint), "--prompt", PROMPT, "--max-new-tokens", "9"
    assert main(["generate", *model, "--json", str(folder / "one.json")]) == 0
    files = "--same-tokens-as", str(folder / "one.json"), "--json", str(folder / "both.json")
    command = ["generate", *model, *files, *options]
    with started(command, world_size, rank_0_serves=serves) as ranks:
        ended = [ranks.wait_for_end(rank) for rank in range(world_size)]
    assert not any(end.status for end in ended), ended
    return ended


def written(folder: Path) -> tuple[dict, dict]:
    one, both = (json.loads((folder / f"{name}.json").read_text()) for name in ("one", "both"))
    return one, both


def calibrated(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *gigabytes: float, memory: float = 64e9
) -> None:
    found = hosts(*gigabytes, memory=memory)
    costs = costs_of(folder / "costs.json", found, [0] * len(found), 2e-8, 1e-6)
    monkeypatch.setenv("TREE_ATTENTION_COSTS", str(costs))


@pytest.mark.deep
@pytest.mark.parametrize(
    ("shares", "weights", "least", "most"),
    [("3,1", "split", 0.7, 0.85), ("3,1", "replicated", 1, 1)],
)
def test_parts_by_numbers(
    checkpoint: Path, tmp_path: Path, shares: str, weights: str, least: float, most: float
) -> None:
    generate(checkpoint, tmp_path, "--shares", shares, "--weights", weights)
    one, both = written(tmp_path)
    assert least <= both["weight_bytes_per_rank"] / one["weight_bytes_per_rank"] <= most


@pytest.mark.deep
@pytest.mark.parametrize("weights", ["split", "replicated"])
def test_parts_by_speed(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: str
) -> None:
    calibrated(tmp_path, monkeypatch, 60, 20)
    first, second = generate(checkpoint, tmp_path, "--shares", "auto", "--weights", weights)
    assert "generate: hosts read, in GB/s: rank 0 (h60) 60, rank 1 (h20) 20; shares " in (
        " ".join(first.stderr.split())
    )
    assert "GB/s" not in second.stderr
    assert written(tmp_path)[1]["world_size"] == 2


@pytest.mark.deep
def test_parts_by_speed_where_weights_cannot_be_split(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shares are then of the cache alone."""
    calibrated(tmp_path, monkeypatch, 60, 20)
    first, _ = generate(checkpoint, tmp_path, "--shares", "auto", "--strategy", "butterfly")
    said = " ".join(first.stderr.split())
    assert "rank 1 (h20) 20; shares cache " in said, said
    assert "every process has all weights: with split weights --strategy must be" in said


@pytest.mark.parametrize(
    ("rates", "serves"), tiers([((60, 0.06), False)], [((0.06, 60), True), ((0.06, 60), False)])
)
def test_a_slow_process_is_left_out(
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rates: tuple[float, float],
    serves: bool,
) -> None:
    """Also the first one, which then serves the store until the other has ended."""
    calibrated(tmp_path, monkeypatch, *rates)
    ended = generate(checkpoint, tmp_path, "--shares", "auto", serves=serves)
    slow = rates.index(0.06)
    sentence = " ".join(ended[slow].stderr.split())
    assert f"generate: this process is left out: rank {slow} (h0.06) reads 0.06 GB/s" in sentence
    assert " in exchanges) with it and " in sentence and sentence.endswith(" ms without")
    of_other = " ".join(ended[1 - slow].stderr.split())
    assert f"generate: left out: rank {slow} (h0.06) reads 0.06 GB/s and rank " in of_other
    told = f"generate: rank {1 - slow} (h60) alone, which reads 60 GB/s: after 32,768 tokens the ne"
    assert told in of_other
    assert ended[slow].stdout == "" and "The same 9 tokens" in ended[1 - slow].stderr
    one, both = written(tmp_path)
    assert both["world_size"] == 1
    assert both["weight_bytes_per_rank"] == one["weight_bytes_per_rank"]


@pytest.mark.deep
@pytest.mark.parametrize(
    ("rates", "size"), [((60, 0.06, 60), 1), ((60, 60, 0.06, 0.06), 2), ((0.06, 0.06, 60, 60), 2)]
)
def test_several_are_left(
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rates: tuple[float, ...],
    size: int,
) -> None:
    """Also where a whole tensor group is left out."""
    calibrated(tmp_path, monkeypatch, *rates)
    options = "--shares", "auto", "--tensor-parallel-size", str(size)
    ended = generate(checkpoint, tmp_path, *options, world_size=len(rates))
    left_out = ["generate: this process is left out: " in end.stderr for end in ended]
    assert left_out == [rate == 0.06 for rate in rates], ended
    assert written(tmp_path)[1]["world_size"] == 2


@pytest.mark.deep
def test_the_first_process_ends_after_one_that_was_killed(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is left out, and serves the store for the other one."""
    calibrated(tmp_path, monkeypatch, 0.06, 60)
    model = "--model", str(checkpoint), "--prompt", PROMPT, "--max-new-tokens", "7900"
    with started(["generate", *model, "--shares", "auto"], rank_0_serves=True) as ranks:
        ranks.wait_for_output(1, " ")
        ranks.send(signal.SIGKILL, 1)
        status, _, said = ranks.wait_for_end(0)
    assert status == 1, said
    assert "generate: no word for 30 s from rank 1, for which this process waits: " in said


class Counts:
    """A store in which rank 3 counts until it has been looked at so many times."""

    def __init__(self, looks: int) -> None:
        self.looks, self.seen, self.ended = looks, 0, {f"{shares._ENDED}/2"}

    def check(self, keys: list[str]) -> bool:
        return self.ended.issuperset(keys)

    def add(self, key: str, _: int) -> int:
        assert key == f"{shares._ALIVE}/3"
        self.seen += 1
        return min(self.seen, self.looks)


def test_a_rank_is_waited_for_while_it_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares.time, "sleep", lambda seconds: None)
    store, looks = Counts(1000), int(30 / shares._LOOK_SECONDS)
    with pytest.raises(ExchangeError, match="no word for 30 s from rank 3, for which this process"):
        shares._wait_for(store, [2, 3], 30.0)
    assert store.seen == 1000 + looks + 1
    store.ended.add(f"{shares._ENDED}/3")
    shares._wait_for(store, [2, 3], 30.0)


def test_a_process_counts_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "_LOOK_SECONDS", 0.001)
    store = dist.HashStore()
    with shares._counting(store, "alive"):
        before = store.add("alive", 0)
        while store.add("alive", 0) < before + 3:  # pytest's timeout ends it
            time.sleep(0.001)
    after = store.add("alive", 0)
    time.sleep(0.01)
    assert store.add("alive", 0) == after


def test_too_little_memory_names_rank_and_bytes(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibrated(tmp_path, monkeypatch, 60, 20, memory=1e3)
    model = "--model", str(checkpoint), "--prompt", PROMPT, "--shares", "auto"
    with started(["generate", *model]) as ranks:
        ended = [ranks.wait_for_end(rank) for rank in range(2)]
    for end in ended:
        said = " ".join(end.stderr.split())
        assert end.status == 2, end
        assert "--shares auto: the model fits under no shares: rank " in said
        assert said.endswith("bytes whatever its share is, and 90% of its memory are 900"), said


@pytest.mark.parametrize(
    ("shares", "says"),
    [
        ("3,1", "--shares: shares must be an integer from 0 to 1,024 for each of 1 ranks, and"),
        ("fair", "--shares must be even, auto, or integers with commas between, one for each pro"),
        ("1.5", "one for each process, such as 3,1, got '1.5'"),
        ("0", "for each of 1 ranks, and not all 0, got [0]"),
        ("-1", "for each of 1 ranks, and not all 0, got [-1]"),
    ],
)
def test_wrong_shares(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], shares: str, says: str
) -> None:
    arguments = "--model", str(checkpoint), "--prompt", "a", f"--shares={shares}"
    assert main(["generate", *arguments]) == 2
    assert says in " ".join(capsys.readouterr().err.split())


def test_auto_of_one_process_is_nothing(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = "--model", str(checkpoint), "--prompt", PROMPT, "--max-new-tokens", "2"
    assert main(["generate", *arguments, "--shares", "auto"]) == 0
    assert "GB/s" not in capsys.readouterr().err
