# SPDX-License-Identifier: BSD-3-Clause
"""The messages that docs/estimate.html draws are those of the simulated cluster."""

import pytest

from benchmarks.harness.report import ROOT
from lab.simulation.clusters import CLUSTERS
from lab.simulation.estimate import CLUSTER, METHODS, as_json, steps
from lab.simulation.problem import Problem
from lab.simulation.steps import bytes_of_formula, simulate


def test_the_page_has_the_steps_of_now() -> None:
    recorded = (ROOT / "docs/estimate_steps.json").read_text()
    assert recorded == as_json(), "run python -m lab.simulation.estimate"


def test_messages_are_those_of_the_formulas() -> None:
    cluster, count = CLUSTERS[CLUSTER], 0
    for name, methods in steps().items():
        p, keys = map(int, name.split())
        for shown, step in methods.items():
            run = simulate(METHODS[shown], Problem(keys), cluster, p)
            sent = [sum(x[2] for x in step["messages"] if x[0] == rank) for rank in range(p)]
            assert sent == run.bytes_sent.tolist()
            assert max(sent) == bytes_of_formula(METHODS[shown], Problem(keys), cluster.topology(p))
            assert step["end"] == pytest.approx(1e6 * run.seconds, abs=1)
            assert all(0 < x[3] <= x[4] <= step["end"] for x in step["messages"])
            count += len(step["messages"])
    assert count > 1000
