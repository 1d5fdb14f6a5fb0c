# SPDX-License-Identifier: BSD-3-Clause
"""The programs about caches measure what they say, on small models."""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks import kv_dtype, restore, step_cost, unequal
from benchmarks.harness import measure
from benchmarks.harness.measure import Samples
from benchmarks.latent import model as latent_model
from benchmarks.latent import operator as latent_operator
from hf_models import make_model
from tree_attention import lean_decode


def test_accuracy_by_kv_dtype(tmp_path: Path) -> None:
    rows = kv_dtype.measure(kv_dtype.CHECKPOINT, torch.float32, {400: 1, 10**6: 1})
    assert [row["kv_dtype"] for row in rows] == ["float32", "int8", "fp8"]
    base, int8, fp8 = rows
    assert base["kld_mean"] == 0.0 and base["same_top"] == 1.0
    assert base["prompts"] == 11 and base["right"] >= 10
    assert 0 < int8["kld_mean"] < fp8["kld_mean"] < 0.1
    assert base["perplexity"] == pytest.approx(int8["perplexity"], rel=0.01)
    # 4 layers, 2 heads, keys and values of 32.
    assert base["bytes_per_token"] == 4 * 2 * 2 * 32 * 4
    assert int8["bytes_per_token"] == fp8["bytes_per_token"] == 4 * 2 * 2 * (32 + 4)
    assert kv_dtype.report_of(rows).wrong == []


def test_restored_prefixes(tmp_path: Path) -> None:
    make_model("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    rows = restore.measure(tmp_path, 100)
    report = restore.report_of(rows)
    assert report.wrong == []
    assert [row["name"].split(", ")[1] for row in rows] == ["bfloat16", "int8"]
    assert rows[1]["bytes"] < rows[0]["bytes"]


def test_caches_of_latents() -> None:
    config = latent_model.configuration(
        hidden_size=64, kv_lora_rank=48, qk_rope_head_dim=16, num_attention_heads=4
    )
    rows = latent_model.run(config, [1024], tokens=2)
    assert latent_model.report_of(rows).wrong == []
    assert rows[0]["bytes_per_token"] == 2 * (48 + 16) * 2
    assert 0 < rows[0]["errors"][latent_model.OURS] < 0.01


def test_cost_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []

    def compile_(forward: Any, fullgraph: bool) -> Any:
        assert fullgraph
        compiled.append(forward)
        return forward

    monkeypatch.setattr(torch, "compile", compile_)
    report = step_cost.report_of(step_cost.measure(2, 0.01), 2)
    assert len(compiled) == 2 and report.wrong == []
    eager, graphs = report.rows[:4], report.rows[4:]
    assert [row["name"] for row in graphs] == [
        "StaticCache, compiled",
        "TreeCache(max_length), compiled",
    ]
    for rows in (eager, graphs):
        assert [row["us_above"] == 0 for row in rows] == [row is rows[0] for row in rows]


def test_a_step_with_wrong_logits_is_marked() -> None:
    measured = [Samples([1.0], torch.full((2,), x)) for x in (1.0, 1.1)]
    row = step_cost.row_of("TreeCache", "eager", measured[1], measured[0], 4)
    assert row["wrong"] and row["us_above"] == 0 and row["us_per_layer"] == 250_000


def test_latent_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "last_level_cache_bytes", lambda: 1 << 20)
    monkeypatch.setattr(latent_operator, "pin_threads", list)
    report = latent_operator.measure(latent_operator.QUICK, 0.0)
    assert report.wrong == [] and len(report.rows) == len(latent_operator.QUICK)
    case = latent_operator.LatentCase(heads=2, keys=10)
    assert case.io_bytes == 10 * 576 * 2 + 2 * (576 + 512) * 2
    assert case.operations == 2 * 2 * (576 + 512) * 10


def test_wrong_latent_attention_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def other_scale(*tensors: torch.Tensor, softmax_scale: float, **options: object):
        return lean_decode(*tensors, softmax_scale=2 * softmax_scale, **options)

    monkeypatch.setattr(measure, "last_level_cache_bytes", lambda: 1 << 20)
    monkeypatch.setattr(latent_operator, "pin_threads", list)
    monkeypatch.setattr(latent_operator, "lean_decode", other_scale)
    assert len(latent_operator.measure(latent_operator.QUICK, 0.0).wrong) == len(
        latent_operator.QUICK
    )


def test_unequal_hosts_are_compared_with_the_sum_of_their_speeds() -> None:
    chosen = unequal.cases(slow=33)
    assert {case.hosts for case in chosen} == {(100,), (33,), (100, 33), (100, 10), (100, 100)}
    times = {
        "100 %, alone": 0.1,
        "33 %, alone": 0.3,
        "100 % + 33 %, each alone": 0.08,
        "100 % + 33 %, 3,1": 0.1,
    }
    rows = [
        {
            "name": case.name,
            "hosts": case.hosts,
            "taken": case.shares,
            "seconds": times[case.name],
            "planned": 0.08 if case.shares == "3,1" else None,
            "other_load": None,
            "token": dict.fromkeys(("p10_us", "median_us", "p90_us"), 1e6 * times[case.name]),
            "wrong": False,
        }
        for case in chosen
        if case.name in times
    ]
    columns = {x.heading: x.values for x in unequal.report_of(rows, 65536).columns}
    assert columns["of the sum of speeds"] == ["1.00", "1.00", "0.94", "0.75"]
    assert columns["of both at once"] == ["-", "-", "1.00", "0.80"]
    assert columns["of the fastest alone"] == ["1.00", "0.33", "1.25", "1.00"]
    assert columns["planned ms"] == ["-", "-", "-", "80"]
    assert columns["ms per token"] == ["100", "300", "80", "100"]


def test_hosts_of_which_each_is_alone_are_busy_for_equally_long(tmp_path: Path) -> None:
    case = unequal.Case((100, 25), unequal.EACH_ALONE)

    def measured(command: list[str], env: dict[str, str]) -> mock.Mock:
        given = json.loads(command[-1])
        seconds = [9.0] * unequal.WARM_UP + [0.1 * 100 / given["percent"]] * given["tokens"]
        result = {"tokens": [7] * len(seconds), "seconds": seconds, "taken": given["shares"]}
        Path(given["out"]).write_text(json.dumps(result))
        return mock.Mock(wait=lambda: 0)

    with mock.patch.object(unequal.subprocess, "Popen", measured):
        [row] = unequal.measure([case], 1024, 3)
    assert row["seconds"] == pytest.approx(1 / (1 / 0.1 + 1 / 0.4)) and not row["wrong"]
    assert len(row["tokens"]) == unequal.WARM_UP + 12


def test_operators_of_a_slow_host_take_longer() -> None:
    slept: list[float] = []
    clock = iter([0.0, 0.001, 0.001, 0.0011, 0.0011, 0.0111])
    with (
        mock.patch.object(unequal.time, "thread_time", lambda: next(clock)),
        mock.patch.object(unequal.time, "sleep", slept.append),
        mock.patch.object(unequal.time, "perf_counter", lambda: sum(slept)),
        unequal.speed_of(25),
    ):
        a = torch.ones(2)
        a = a * 3
        assert (a + 1).tolist() == [4.0, 4.0]
    assert slept == pytest.approx([0.003, 0.0003, 0.03])
    assert not isinstance(unequal.speed_of(100), unequal.Slowed)
