# SPDX-License-Identifier: BSD-3-Clause
"""docs/estimate.html, as `estimate.py` prints it, computes what `plan` does, in a browser."""

import json
import math
import random
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from browser import console_of, needs_browser
from estimate import alone, dense
from tree_attention.planning.arithmetic import ALL_FORMS, DATA, FORMS, MAX_CONTEXT, Plan, Work
from tree_attention.planning.machines import LINKS, MACHINES, Hosts
from tree_attention.planning.models import KV_DTYPES, NAMED, WEIGHT_DTYPES

CHOICES = {
    "model": list(dense()),
    "machine": list(MACHINES),
    "link": list(LINKS),
    "kv": list(KV_DTYPES),
    "weights": list(WEIGHT_DTYPES),
    "ranks": [1, 2, 3, 4, 6, 8, 16, 24, 40, 64],
}
pytestmark = pytest.mark.deep


def points() -> list[dict]:
    """Return 200 inputs, the last with the longest context."""
    rng = random.Random(0)
    drawn = [{name: rng.choice(x) for name, x in CHOICES.items()} for _ in range(200)]
    contexts = [*(round(2 ** rng.uniform(0, 24)) for _ in range(199)), MAX_CONTEXT]
    return [{**x, "context": n} for x, n in zip(drawn, contexts, strict=True)]


def planned(point: dict) -> dict:
    """Return what the planner says of a point, as the page names it."""
    model = replace(NAMED[point["model"]], kv_dtype=point["kv"])
    model = replace(model, weights=model.weights.quantised(point["weights"]))
    hosts = Hosts(MACHINES[point["machine"]], LINKS[point["link"]])
    plan = Plan(model, hosts, point["ranks"], Work(point["context"]))
    rows = [
        {
            "form": form,
            "refusal": plan.refusal(form),
            "weights": plan.split(form).weights_bytes,
            "cache": plan.split(form).cache_bytes,
            "token": asdict(plan.split(form).token_seconds(hosts)),
            "prefill": asdict(plan.split(form).prefill_seconds(hosts)),
            "breakEven": plan.break_even(form, DATA) if form in FORMS and plan.ranks > 1 else None,
            "longest": plan.longest(form),
        }
        for form in ALL_FORMS
    ]
    return {"rows": rows, "best": plan.best()}


def same(ours: object, of_plan: object) -> bool:
    if isinstance(of_plan, dict):
        return all(same(ours[key], x) for key, x in of_plan.items())
    if isinstance(of_plan, list):
        return all(same(x, y) for x, y in zip(ours, of_plan, strict=True))
    return math.isclose(ours, of_plan, rel_tol=1e-12) if type(of_plan) is float else ours == of_plan


@needs_browser
def test_page_computes_what_the_planner_does(tmp_path: Path) -> None:
    page, asked = alone(), points()
    assert not re.search(r"https?:|@import|src=", page.partition("<script id")[0])
    script = f"JSON.stringify({json.dumps(asked)}.map(estimate))"
    script = f"<pre></pre><script>document.querySelector('pre').textContent = {script};</script>"
    (tmp_path / "page.html").write_text(page + script)
    dom, errors = console_of(f"file://{tmp_path}/page.html")
    assert not errors
    found = json.loads(re.search(r"<pre>(.*)</pre>", dom, re.DOTALL)[1])
    wanted = [planned(point) for point in asked]
    assert {x["refusal"] for one in wanted for x in one["rows"]} == {"", "no room", "uneven"}
    assert len({one["best"] for one in wanted}) > 4 and len(found) == 200
    assert not [x for x in zip(asked, found, wanted, strict=True) if not same(x[1], x[2])]
    # What it shows first is the first example of docs/planning.md.
    words = " ".join(re.sub(r"<[^>]*>", " ", dom.partition('<script id="tables"')[0]).split())
    assert "Fastest: cache and weights, largest T, 16.1 ms per new token with 31.1 GB" in words
    assert all(f"{name} :" in words for name in ("tree", "pass-Q", "ring"))


def test_a_wrong_number_is_found() -> None:
    ours, of_plan = planned(points()[0]), planned(points()[0])
    assert same(ours, of_plan)
    ours["rows"][2]["prefill"]["attention"] *= 1 + 1e-9
    assert not same(ours, of_plan)
