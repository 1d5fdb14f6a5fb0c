# SPDX-License-Identifier: BSD-3-Clause
"""docs/estimate.html, as the site has it, computes what `plan` does, in a browser."""

import json
import math
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.simulation.clusters import CLUSTERS
from benchmarks.simulation.problem import Problem
from benchmarks.simulation.steps import bytes_of_formula, simulate
from browser import console_of, needs_browser
from estimate import CLUSTER, METHODS, filled, steps
from tree_attention.planning.arithmetic import ALL_FORMS, DATA, FORMS, MAX_CONTEXT, Plan, Work
from tree_attention.planning.machines import LINKS, MACHINES, Hosts
from tree_attention.planning.models import KV_DTYPES, NAMED, WEIGHT_DTYPES

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.deep, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def page() -> str:
    return filled((ROOT / "docs/estimate.html").read_text())


def points() -> list[dict]:
    """Return 200 inputs, among them one host and the longest context."""
    rng = random.Random(0)
    drawn = [
        {
            "model": rng.choice(list(NAMED)),
            "machine": rng.choice(list(MACHINES)),
            "link": rng.choice(list(LINKS)),
            "kv": rng.choice(list(KV_DTYPES)),
            "weights": rng.choice(list(WEIGHT_DTYPES)),
            "ranks": rng.choice([1, 2, 3, 4, 6, 8, 16, 24, 40, 64]),
            "context": round(2 ** rng.uniform(0, 24)),
        }
        for _ in range(199)
    ]
    return [*drawn, {**drawn[0], "context": MAX_CONTEXT}]


def planned(point: dict) -> tuple[list[dict], str | None]:
    """Return what the planner says of a point, as the page names it."""
    model = replace(NAMED[point["model"]], kv_dtype=point["kv"])
    model = replace(model, weights=model.weights.quantised(point["weights"]))
    hosts = Hosts(MACHINES[point["machine"]], LINKS[point["link"]])
    plan = Plan(model, hosts, point["ranks"], Work(point["context"]))
    rows = []
    for form in ALL_FORMS:
        split = plan.split(form)
        compares = form in FORMS and plan.ranks > 1
        row = {
            "form": form,
            "refusal": plan.refusal(form),
            "weights": split.weights_bytes,
            "cache": split.cache_bytes,
            "breakEven": plan.break_even(form, DATA) if compares else None,
            "longest": plan.longest(form),
        }
        for name, seconds in (
            ("token", split.token_seconds(hosts)),
            ("prefill", split.prefill_seconds(hosts)),
        ):
            times = {"local": seconds.local, "exchange": seconds.exchange, "total": seconds.total}
            row |= {f"{name}.{key}": value for key, value in times.items()}
        rows.append(row)
    return rows, plan.best()


def differences(ours: dict, of_plan: dict) -> list[str]:
    flat = {key: x for key, x in ours.items() if not isinstance(x, dict)}
    for name in ("token", "prefill"):
        flat |= {f"{name}.{key}": x for key, x in ours[name].items()}
    assert flat.keys() == of_plan.keys()

    def same(a: object, b: object) -> bool:
        is_number = isinstance(a, int | float) and isinstance(b, int | float)
        return math.isclose(a, b, rel_tol=1e-12) if is_number else a == b

    return [f"{key}: {flat[key]}, {x}" for key, x in of_plan.items() if not same(flat[key], x)]


@needs_browser
def test_page_computes_what_the_planner_does(page: str, tmp_path: Path) -> None:
    asked = points()
    script = (
        f"<script>const found = {json.dumps(asked)}.map(estimate);"
        'document.body.innerHTML = "<pre></pre>";'
        'document.querySelector("pre").textContent = JSON.stringify(found);</script>'
    )
    (tmp_path / "page.html").write_text(page.replace("</body>", f"{script}</body>"))
    dom, errors = console_of(f"file://{tmp_path}/page.html")
    assert not errors
    found = json.loads(re.search(r"<pre>(.*)</pre>", dom, re.DOTALL)[1])
    assert len(found) == len(asked) == 200
    wanted = [planned(point) for point in asked]
    refusals = {row["refusal"] for rows, _ in wanted for row in rows}
    assert refusals == {"", "no room", "uneven"}
    assert len({best for _, best in wanted}) > 4
    for point, ours, (rows, best) in zip(asked, found, wanted, strict=True):
        assert ours["best"] == best, point
        for one, other in zip(ours["rows"], rows, strict=True):
            assert not differences(one, other), (point, one["form"], differences(one, other))


@needs_browser
def test_page_shows_its_first_point_and_fetches_nothing(page: str, tmp_path: Path) -> None:
    assert not re.search(r"https?:|@import|src=", page.partition("<script id")[0])
    (tmp_path / "page.html").write_text(page)
    dom, errors = console_of(f"file://{tmp_path}/page.html")
    assert not errors
    words = " ".join(re.sub(r"<[^>]*>", " ", dom.partition('<script id="tables"')[0]).split())
    # The first example of docs/planning.md.
    assert "Soonest: tree, weights split, largest T, 16.1 ms a token with 31.1 GB" in words
    assert all(f"{name} :" in words for name in ("tree", "pass-Q", "ring"))


def test_messages_are_those_of_the_formulas() -> None:
    for name, methods in steps().items():
        p, keys = map(int, name.split())
        for shown, recorded in methods.items():
            cluster, problem = CLUSTERS[CLUSTER], Problem(keys)
            run = simulate(METHODS[shown], problem, cluster, p)
            sent = [sum(x[2] for x in recorded["messages"] if x[0] == rank) for rank in range(p)]
            assert sent == run.bytes_sent.tolist()
            formula = bytes_of_formula(METHODS[shown], problem, cluster.topology(p))
            assert max(sent) == formula
            assert len(recorded["messages"]) == run.messages_sent.sum() > 0
            assert recorded["end"] == pytest.approx(1e6 * run.seconds, abs=1)
            assert all(0 < x[3] <= x[4] <= recorded["end"] for x in recorded["messages"])


def test_a_wrong_number_is_found() -> None:
    (row, *_), _ = planned(points()[0])
    ours = {key: x for key, x in row.items() if "." not in key}
    for name in ("token", "prefill"):
        ours[name] = {key: row[f"{name}.{key}"] for key in ("local", "exchange", "total")}
    assert not differences(ours, row)
    ours["prefill"]["local"] *= 1 + 1e-9
    assert len(differences({**ours, "refusal": "uneven"}, row)) == 2
