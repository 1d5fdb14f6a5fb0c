# SPDX-License-Identifier: BSD-3-Clause
"""The programs of benchmarks/papers in a small form: they end well and write their files."""

import json
from unittest import mock

import pytest

from benchmarks.papers import algorithm_4, lsh, slow_memory, theorem1
from benchmarks.papers.survey import __main__ as survey

PROGRAMS = {
    "theorem1": (theorem1, ["--ranks", "2", "8", "33"]),
    "slow_memory": (slow_memory, ["--quick"]),
    "algorithm_4": (algorithm_4, ["--outputs", "3", "--iterations", "6", "--ctas", "5"]),
    "lsh": (lsh, ["--seqlen", "64"]),
}


def rows_of(name, tmp_path):
    program, arguments = PROGRAMS[name]
    found, finish = [], program.finish

    def finish_and_keep(report, *options):
        found.extend(json.loads(json.dumps(report.rows)))
        return finish(report, *options)

    with mock.patch.object(program, "finish", finish_and_keep):
        assert program.main([*arguments, "--out", str(tmp_path)]) == 0
    assert (tmp_path / f"{name}.md").read_text().count("\n| ") > 2
    return found


def test_theorem_1_program_has_the_ring_beside_every_tree(tmp_path):
    rows = rows_of("theorem1", tmp_path)
    assert [row["ring"]["steps"] for row in rows] == [1, 7, 32]
    assert [row["tree"]["2"]["steps"] for row in rows] == [2, 6, 12]
    assert [row["tree"]["16"]["steps"] for row in rows] == [2, 2, 4]
    state = 16 * 128 + 16
    for row in rows:
        ranks = row["ranks"]
        assert {tree["elements"] for tree in row["tree"].values()} == {2 * (ranks - 1) * state}
        # Eq. 10 has p in place of p - 1 sends, and Eq. 11 is the shard.
        shard = 2 * (5_120_000 // ranks) * 2048
        assert row["ring"]["elements"] == (ranks - 1) * ranks * shard
        assert row["ring"]["busiest_elements"] == (ranks - 1) * shard


def test_slow_memory_program_counts_what_the_formula_says(tmp_path):
    for row in rows_of("slow_memory", tmp_path):
        assert row["flash"] == row["formula"]
        assert 12 < row["flash"] / row["theta"] < 14


def test_algorithm_4_program_tells_printed_from_corrected(tmp_path):
    rows = {row["name"]: row for row in rows_of("algorithm_4", tmp_path)}
    assert all(row["right"] + row["lost"] + row["hangs"] == 90 for row in rows.values())
    assert rows["Balanced"]["right"] == rows["CorrectedLast"]["right"] == 90
    assert min(rows["AsPrinted"]["lost"], rows["AsPrintedRoundedUp"]["hangs"]) > 0
    assert rows["LastByShare"]["lost"] == 0 < rows["LastByShare"]["hangs"]


def test_lsh_program_errs_less_with_more_rounds(tmp_path):
    for buckets in (4, 16):
        rows = [row for row in rows_of("lsh", tmp_path) if row["buckets"] == buckets]
        assert rows[-1]["error"] < rows[0]["error"] / 2
        assert rows[-1]["seen"] > rows[0]["seen"]


@pytest.mark.parametrize(
    "report, name", [("errors", "survey_errors"), ("waste", "cache_waste"), ("chunks", "lsh_time")]
)
def test_survey_program(report, name, tmp_path, monkeypatch):
    monkeypatch.setattr(survey, "LENGTHS", (256,))
    assert survey.main([report, "--out", str(tmp_path)]) == 0
    assert (tmp_path / f"{name}.md").read_text().count("\n| ") > 1


@pytest.mark.parametrize(
    "program, arguments, message",
    [
        (theorem1, ["--ranks", "1"], "a world has two ranks or more"),
        (algorithm_4, ["--ctas", "0"], "--outputs, --iterations and --ctas are at least 1"),
        (lsh, ["--seqlen", "8"], "--seqlen is at least 64"),
    ],
)
def test_papers_programs_refuse_sizes_that_have_no_meaning(program, arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        program.main(arguments)
    assert message in capsys.readouterr().err
