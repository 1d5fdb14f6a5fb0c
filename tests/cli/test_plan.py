# SPDX-License-Identifier: BSD-3-Clause
"""`plan`: what it prints and writes, and a sentence for every mistake."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

from tree_attention.__main__ import main
from tree_attention._numbers import in_digits
from tree_attention.exchange.auto.choose import CostTable, Measured
from tree_attention.planning.arithmetic import ALL_FORMS, FORMS, SPLIT, SPLIT_BY_HEADS
from tree_attention.planning.models import NAMED
from unequal_hosts import costs_of, hosts

MODEL = ("plan", "--model", "llama-3.1-8b")
ARGUMENTS = (*MODEL, "--context", "128k", "--ranks", "8", "--machine", "h200")


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main([*ARGUMENTS, *arguments]) == 0
    return capsys.readouterr().out


def test_plan_prints_every_form(capsys: pytest.CaptureFixture[str]) -> None:
    output = printed(capsys)
    assert output.startswith(
        "Llama 3.1 8B, cache in bf16, 131,072 tokens, 8 ranks\n"
        "Model: 8.03 billion weights in 16.1 GB.\n"
        "Cache: 131,072 bytes a token in 32 layers.\n"
        "Rank: 141 GB"
    )
    for form in ALL_FORMS:
        (line,) = (
            x for x in output.splitlines() if x.strip().startswith((f"{form}  ", f"{form} * "))
        )
        assert len(line.rsplit(maxsplit=7)) == 8 and "…" not in line
    assert "splitting the cache makes a token faster than data parallel from" in output


def test_options_change_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    output = printed(capsys, "--kv-dtype", "int8", "--sequences", "4", "--link", "100gbe")
    assert "cache in int8, 4 sequences of 131,072 tokens" in output
    assert "12.5 GB/s, 50 us a round" in output


def test_plan_of_a_checkpoint(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = printed(capsys, "--model", str(checkpoint))
    assert output.startswith(f"{checkpoint.name}, cache in bf16")


def test_link_from_a_calibration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = Measured("all_gather", 1000, 2e-3), Measured("all_gather", 2000, 3e-3)
    CostTable("gloo", (0, 1), rows).save(tmp_path / "costs.json", {})
    output = printed(capsys, "--calibration", str(tmp_path / "costs.json"))
    assert "Link: 0.001 GB/s, 1e+03 us a round (fitted to costs.json, measured over gl" in output


UNEQUAL = (*MODEL, "--context", "32k")


def measured(path: Path, *gigabytes: float, memory: float = 64e9) -> str:
    """A table of hosts that read so many GB/s, on a link that is nearly 10 GbE."""
    found = hosts(*gigabytes, memory=memory)
    return str(costs_of(path / "costs.json", found, range(len(found) or 2), 170e-6, 1010e-6))


def rows(output: str, *begins: str) -> list[list[str]]:
    """The cells of the rows that begin so."""
    lines = [x.strip() for x in output.splitlines()]
    return [x.split("  ") for b in begins for x in lines if x.startswith((f"{b}  ", f"{b} * "))]


def test_hosts_of_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the arithmetic of tests/planning/test_unequal.py, with a link that is nearly 10 GbE."""
    path = measured(tmp_path, 60, 20)
    assert main([*UNEQUAL, "--hosts", path]) == 0
    output = capsys.readouterr().out
    assert "Rank 1: 64 GB at 20 GB/s, 2 TFLOP/s (h20, measured).\n" in output
    assert "us a round (fitted to costs.json, measured over gloo on 2 ranks)." in output
    cells = [
        [x.strip() for x in row if x.strip()]
        for row in rows(output, *FORMS[:3], "0 (h60)", "1 (h20)")
    ]
    assert [row[0] for row in cells] == [*FORMS[:2], f"{SPLIT} *", "0 (h60)", "1 (h20)"]
    assert cells[2][1:5] == ["3, 1; cache 15, 1", "278", "6%", "539 ms"]
    assert cells[3][1:5] == ["12.4", "4.03", "64", "261"] and cells[3][-1] == "965"
    assert cells[4][1:5] == ["5.22", "0.268", "64", "261"] and cells[4][-1] == "322"
    sentences = " ".join(output.split())
    assert "No rank waits long for another in a token: they are busy for 261 ms, and" in sentences
    assert "Rank 0 (h60) sets the pace of a prompt: it is busy for " in sentences
    assert "The fastest alone, rank 0 (h60), takes 322 ms per token. Leaving out" in sentences
    assert "without rank 1 (h20) a token takes about 322 ms in place of 278 ms." in sentences


def test_a_slow_host_is_better_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*UNEQUAL, "--hosts", measured(tmp_path, 60, 6), "--link", "10gbe"]) == 0
    sentences = " ".join(capsys.readouterr().out.split())
    assert "Rank 1 (h6) sets the pace of a token: it is busy for 472 ms" in sentences
    assert "takes 322 ms per token, less than all together. Rank 1 (h6) reads 6 GB/s and" in (
        sentences
    )
    told = "487 ms (15.6 ms in exchanges) with it and 322 ms without; start without it, or keep it "
    assert sentences.endswith(f"{told}for 64 GB of memory.")


@pytest.mark.parametrize(
    ("shares", "token", "says"),
    [
        (
            "even",
            "539",
            "would be shares 3, 1; cache 15, 1, with cache and weights, T = 1 split: 278 ms per ",
        ),
        (
            "3,1",
            "318",
            "would be shares 3, 1; cache 15, 1, with cache and weights, T = 1 split: 278 ms per ",
        ),
        ("auto", "278", ""),
    ],
)
def test_given_shares_beside_those_by_speed(
    shares: str, token: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = measured(tmp_path, 60, 20)
    assert main([*UNEQUAL, "--hosts", path, "--shares", shares]) == 0
    output = capsys.readouterr().out
    (row,) = rows(output, SPLIT)
    taken = {"auto": "3, 1; cache 15, 1"}.get(shares, shares.replace(",", ", "))
    assert [x.strip() for x in row if x.strip()][1:3] == [taken, token]
    assert says in " ".join(output.split()) and ("By speed" in output) == bool(says)


def test_ranks_that_wait_for_one_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are busy for equally long, and not at the same time."""
    path = measured(tmp_path, 60, 20)
    assert main([*UNEQUAL, "--hosts", path, "--shares", "4,1"]) == 0
    sentences = " ".join(capsys.readouterr().out.split())
    assert (
        "In a token the others wait for rank 1 (h20) in attention, 124 ms, and for rank 0 (h60) in "
        "the products with split matrices, 179 ms; exchanges take "
    ) in sentences


def test_data_sheets_of_several_machines(capsys: pytest.CaptureFixture[str]) -> None:
    several = [x for name in ("h100", "h100", "a100", "a100") for x in ("--machine", name)]
    assert main([*UNEQUAL, *several, "--shares", "2,2,1,0"]) == 0
    output = capsys.readouterr().out
    assert "Rank 2: 80 GB at 2,039 GB/s, 156 TFLOP/s (A100 SXM 80 GB, data sheet).\n" in output
    assert "Link: 300 GB/s" in output  # the slower one
    (row,) = rows(output, SPLIT_BY_HEADS)  # of one tensor group
    assert "uneven" in map(str.strip, row)


def test_hosts_without_room(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*UNEQUAL, "--hosts", measured(tmp_path, 60, 20, memory=4e9)]) == 0
    output = capsys.readouterr().out
    assert output.count("no room") == len(FORMS) and "Of each rank" not in output
    assert "split, the model fits under no shares: rank 0 (h60) needs " in " ".join(output.split())


@pytest.mark.parametrize(
    ("gigabytes", "arguments", "sentence"),
    [
        ((), [], "--hosts {}: an older version wrote this table, which does not say how fast ho"),
        ((60, 20), ["--ranks", "3"], "--ranks must be left out or 2, the number of ranks of --ho"),
        ((60, 20), ["--shares", "3"], "--shares must be an integer from 0 to 1,024 for each of 2"),
        ((60, 20), ["--shares", "0,0"], "--shares must be an integer from 0 to 1,024 for each of"),
        ((60, 20), ["--shares", "3,x"], "--shares must be even, auto, or integers with commas"),
        ((60, 20), ["--shares", "-3,1"], "--shares must be an integer from 0 to 1,024 for each"),
        ((60, 20), ["--calibration", "x"], "--calibration is not needed: the table of --hosts h"),
        ((60, 20), ["--sequences", "0"], "--sequences must be 1 to 16,384, got 0"),
    ],
)
def test_mistakes_with_hosts(
    gigabytes: tuple[float, ...],
    arguments: list[str],
    sentence: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = measured(tmp_path, *gigabytes)
    joined = [f"--shares={x}" for x in arguments[1:]] if "--shares" in arguments else arguments
    assert main([*UNEQUAL, "--hosts", path, *joined]) == 2
    output = capsys.readouterr()
    assert output.err.startswith(f"plan: {sentence.format(path)}") and output.out == ""


def test_a_damaged_or_missing_table_of_hosts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(measured(tmp_path, 60, 20))
    for old, new, says in (
        (
            '"read": 60',
            '"read": -60',
            "machines must each have a host, read, weights, flop, memory",
        ),
        ('"format": 5', '"format": 6', "it was written by another version; write a new one"),
        ("{", "[", ""),
        (None, None, "No such file or directory; write a new one with"),
    ):
        text = path.read_text()
        if old is None:
            path.unlink()
        else:
            assert old in text
            path.write_text(text.replace(old, new, 1))
        assert main([*UNEQUAL, "--hosts", str(path)]) == 2
        output = capsys.readouterr()
        start = f"plan: --hosts: table of exchange costs {path}"
        assert output.err.startswith(start) and says in output.err and output.out == ""
        assert "with `python -m tree_attention calibrate`" in output.err
        path.write_text(text)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--machine", "cpu"], "--ranks is missing: how many ranks have this --machine?"),
        (
            ["--machine", "cpu", "--ranks", "2", "--shares", "3,1"],
            "--shares is for ranks that differ: give --hosts, or --machine for each",
        ),
        (
            ["--machine", "cpu", "--machine", "h100", "--ranks", "4"],
            "--ranks must be left out or 2, the number of ranks of several --machine, got 4",
        ),
    ],
)
def test_mistakes_with_machines(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*UNEQUAL, *arguments]) == 2
    output = capsys.readouterr()
    assert output.err == f"plan: {sentence}\n" and output.out == ""


@pytest.mark.parametrize("arguments", [[], ["--machine", "cpu", "--hosts", "costs.json"]])
def test_machines_are_given_in_one_way(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*UNEQUAL, *arguments])
    assert ended.value.code == 2 and "--hosts" in capsys.readouterr().err


FAR = (*UNEQUAL, "--ranks", "1", "--far", "cpu", "--near-tokens", "8k")


def test_far_keys(capsys: pytest.CaptureFixture[str]) -> None:
    """By the arithmetic of tests/planning/test_plans.py."""
    assert main([*FAR, "--machine", "rtx4090"]) == 0
    output = capsys.readouterr().out
    assert "Far keys: of all but the newest 8,192 tokens, on a host for each rank: 512 GB" in output
    assert "bus 24 GB/s and 20 us per layer" in output
    first, others = (
        next([x.strip() for x in row if x.strip()] for row in rows(output, form))
        for form in ("cache", "data parallel")
    )
    assert first[1:4] == ["16.1", "1.07", "3.22"] and others[1:4] == ["16.1", "4.29", "0"]
    sentences = " ".join(output.split())
    assert "the host reads 3.22 GB in 10.5 ms while the GPU attends to near keys for 1.07 ms" in (
        sentences
    )
    assert (
        "791 kB cross the bus for a token in 0.673 ms, one byte for 4,075 of far keys; the GPU "
        "waits for 10.1 ms." in sentences
    )
    assert sentences.endswith("takes at least 179 ms on a rank.")


def test_far_keys_of_a_checkpoint(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "--model", str(checkpoint), "--machine", "h200"
    assert main([*FAR, *arguments]) == 0
    assert "Far keys, with cache split: for a token the host reads" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--machine", "cpu"], "--far cpu is for equal GPUs with a host each: give one --machine "),
        (
            ["--machine", "h100", "--machine", "h100"],
            "--far cpu is for equal GPUs with a host each",
        ),
        (["--hosts", "costs.json"], "--far cpu is for equal GPUs with a host each: give one --mac"),
        (["--machine", "h100", "--near-tokens", "0"], "--near-tokens must be a whole number of to"),
        (["--machine", "h100", "--near-tokens", "x"], "--near-tokens must be a whole number of to"),
        (
            ["--machine", "h100", "--model", "glm-4.7-flash"],
            "--model: far keys are not supported with latents, as ",
        ),
    ],
)
def test_mistakes_with_far_keys(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*FAR, *arguments]) == 2
    output = capsys.readouterr()
    assert output.err.startswith(f"plan: {sentence}") and output.out == ""


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--far", "cpu"], "--far cpu needs --near-tokens, the number of newest tokens whose keys"),
        (["--near-tokens", "8k"], "--near-tokens is for --far cpu: give both, or neither"),
        (["--ranks", "0"], "--ranks must be 1 to 16,384, got 0"),
        (["--ranks", "20000"], "--ranks must be 1 to 16,384, got 20,000"),
        (["--sequences", "-1"], "--sequences must be 1 to 16,384, got -1"),
        (["--model", "llama-9"], "--model: llama-9 is no directory with config.json, and the"),
        (
            ["--calibration", "/proc/no/costs"],
            "--calibration: table of exchange costs /proc/no/costs: No",
        ),
    ],
)
def test_plan_says_what_to_put_right(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*ARGUMENTS, *arguments]) == 2
    output = capsys.readouterr()
    assert output.err.startswith(f"plan: {sentence}") and output.out == ""


def test_numbers_are_short() -> None:
    assert [in_digits(x) for x in (12345.6, 99.94, 0.01234)] == ["12,346", "99.9", "0.0123"]


def test_choices_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit), mock.patch.dict("os.environ", {"COLUMNS": "200"}):
        main([*ARGUMENTS, "--gpu", "h300"])
    assert "'h300' (choose from" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("meta-llama/Llama-3.1-8B", "; did you mean llama-3.1-8b?"),
        ("llama-3.1-70", "; did you mean llama-3.1-70b?"),
        ("gpt-2", ""),
    ],
)
def test_a_name_that_is_nearly_one(
    typed: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = "--context=1k", "--ranks=1", "--machine=cpu"
    assert main(["plan", f"--model={typed}", *options]) == 2
    assert capsys.readouterr().err.endswith(f"{list(NAMED)[-1]}{meant}\n")
