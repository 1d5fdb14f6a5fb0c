# SPDX-License-Identifier: BSD-3-Clause
"""The programs of lab/papers in a small form: they end well and write their files."""

import json
from importlib.metadata import PackageNotFoundError
from itertools import pairwise
from unittest import mock

import pytest
import torch

from benchmarks.harness import measure
from benchmarks.harness.operations import counted
from lab.papers import (
    algorithm_4,
    gradient_cost,
    jax_listing,
    lsh,
    positions,
    schedules,
    slow_memory,
    theorem1,
)
from lab.papers.survey import __main__ as survey
from tree_attention import lean_decode

PROGRAMS = {
    "gradient_cost": (gradient_cost, ["--ranks", "1", "4", "16"]),
    "lean_schedules": (schedules, ["--heads", "1", "3", "--keys", "768", "--seconds", "0"]),
    "jax_listing": (jax_listing, []),
    "positions": (positions, ["--steps", "2"]),
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


def test_operations_and_their_longest_chain():
    a, b = torch.ones(3, 4), torch.ones(4, 5)
    total, counts = counted(lambda: (a @ b).exp().sum())
    assert total == pytest.approx(15 * 54.59815, rel=1e-5)
    # Products and sums of 4 terms each, then exponentials, then a tree over 15 of them.
    assert counts == {"operations": 2 * 4 * 15 + 15 + 15, "depth": 3 + 1 + 4}
    _, apart = counted(lambda: (a.exp(), b.exp().exp(), a.t().reshape(-1)))
    assert apart == {"operations": 12 + 40, "depth": 2}


def test_gradient_program_finds_it_as_cheap_as_the_value(tmp_path):
    rows = rows_of("gradient_cost", tmp_path)
    assert not any(row["wrong"] for row in rows)
    depths = [row["costs"]["value"]["depth"] for row in rows]
    # Two reductions over the ranks, of maxima and of sums.
    assert [b - a for a, b in pairwise(depths)] == [2 * 2, 2 * 2]
    for row in rows:
        value, explicit, back = row["costs"].values()
        keys = row["ranks"] * gradient_cost.KEYS
        assert value["operations"] > 4 * keys * gradient_cost.HEAD_DIM
        for gradient in (explicit, back):
            assert 1.4 < gradient["operations"] / value["operations"] < 1.6
            assert 1 < gradient["depth"] / value["depth"] < 2


def test_schedules_program_has_the_parts_of_its_names(tmp_path):
    with (
        mock.patch.object(schedules, "pin_threads"),
        mock.patch.object(measure, "last_level_cache_bytes", lambda: 1 << 16),
        mock.patch.object(torch, "get_num_threads", lambda: 2),
    ):
        one, three = rows_of("lean_schedules", tmp_path)
    assert not one["wrong"] and not three["wrong"] and min(one["times"].values()) > 0
    assert one["parts"][schedules.FLASH_DECODING] == 2 and one["tiles"]["FlashAttention-2"] == 2
    # Three outputs fill two SMs for FlashDecoding's rule, and take two waves for one and a half.
    assert three["parts"][schedules.FLASH_DECODING] == 1
    assert three["tiles"][schedules.FLASH_DECODING] == pytest.approx(2 / 1.5)


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


@pytest.mark.deep
def test_listing_in_jax_is_right_for_one_query_of_one_sequence(tmp_path):
    pytest.importorskip("jax")
    one_query, *others = rows_of("jax_listing", tmp_path)
    assert one_query["printed"] < 1e-12
    *seen, same_sizes = (row["printed"] for row in others)
    assert all(text.startswith(("refused: ", "shape [")) for text in seen)
    assert same_sizes > 1
    assert all(row["mended"] < 1e-12 for row in (one_query, *others))


def test_listing_in_jax_says_that_jax_is_missing(capsys):
    with (
        mock.patch.object(jax_listing, "version", side_effect=PackageNotFoundError),
        pytest.raises(SystemExit),
    ):
        jax_listing.main([])
    assert "JAX is not installed; run: pip install jax" in capsys.readouterr().err


@pytest.mark.deep
def test_positions_are_those_of_the_trained_models(tmp_path):
    """The library attends as the matrix of scores does with which they were trained."""
    with mock.patch.object(positions, "HELD_OUT_BYTES", 2049):
        rows = rows_of("positions", tmp_path)
    assert [row["name"] for row in rows] == list(positions.KINDS)
    for row in rows:
        assert row["error"] < 1e-4
        assert all(1 < perplexity < 1e4 for perplexity in row["perplexity"].values())


def test_attention_without_its_slopes_shows_as_a_difference():
    torch.manual_seed(0)
    model, text = positions.Model("ALiBi"), torch.randint(256, (129,))
    assert positions.evaluate(model, text, 128)[1] < 1e-4
    with mock.patch.object(positions, "lean_decode", lambda *args, **_: lean_decode(*args)):
        assert positions.evaluate(model, text, 128)[1] > 100 * positions.TOLERANCE


def test_perplexity_weighs_bytes_and_not_groups_of_windows():
    torch.manual_seed(0)
    model = positions.Model("ALiBi")
    text = torch.cat([torch.randint(256, (4096,)), torch.zeros(129, dtype=torch.long)])
    windows, following = text[:-1].view(33, 128), text[1:].view(33, 128)  # groups of 32 and of 1
    with torch.no_grad():
        logits = model(windows, positions.by_scores)
    losses = torch.nn.functional.cross_entropy(logits.mT, following, reduction="none")
    assert abs(losses[-1].mean() - losses.mean()) > 0.1  # groups of equal weight would show it
    expected = losses.mean().exp().item()
    assert positions.evaluate(model, text, 128)[0] == pytest.approx(expected, rel=1e-4)
