#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""Numbers of docs/estimate.html, out of the planner's tables and of messages that were recorded.

As a program it prints the page by itself, without the site: it needs numpy and the planner alone.
"""

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tree_attention import shares
from tree_attention.planning import arithmetic, machines, models

EMPTY = '<script id="tables" type="application/json"></script>'
DOCS = Path(__file__).parents[2] / "docs"
STEPS = DOCS / "estimate_steps.json"  # which `python -m lab.simulation.estimate` writes
# Of a page by itself, which has nothing of the site's theme.
HEAD = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>Estimate</title>
<style>
  body { max-width: 61rem; margin: 1rem auto; padding: 0 1rem; font: 1em/1.5 sans-serif; }
</style>
<h1>Estimate</h1>
"""


def dense() -> dict[str, dict[str, Any]]:
    """Return the numbers of the named models for which the page has arithmetic: layers that all
    keep keys and values of the whole context, and no experts."""
    return {
        name: {**asdict(model), "attention": asdict(attention), "weights": asdict(model.weights)}
        for name, model in models.NAMED.items()
        for attention in model.attention
        if model.attention == (replace(attention, window=None, latent=None, index=None),)
        and not (model.weights.experts or model.states_bytes)
    }


def tables() -> str:
    constants = {
        name: getattr(arithmetic, name) for name in ("FORMS", "TENSOR", "DATA", "MAX_CONTEXT")
    }
    return json.dumps(
        {
            **constants,
            "BF16": models.BF16,
            "FP32": models.FP32,
            "CHUNK": arithmetic.Work(1).chunk,
            "SUSTAINED": machines.SUSTAINED,
            "LEAST_SAVED": shares.LEAST_SAVED,
            "models": dense(),
            "machines": {name: asdict(x) for name, x in machines.MACHINES.items()},
            "links": {name: asdict(x) for name, x in machines.LINKS.items()},
            "kv_dtypes": models.KV_DTYPES,
            "weight_dtypes": models.WEIGHT_DTYPES,
            "steps": json.loads(STEPS.read_text()),
        },
        separators=(",", ":"),
    )


def filled(page: str) -> str:
    """Put the numbers into the page."""
    return page.replace(EMPTY, EMPTY.replace("></", f">{tables()}</"), 1)


def alone() -> str:
    """Return the page outside of the site."""
    return HEAD + filled((DOCS / "estimate.html").read_text())


if __name__ == "__main__":
    sys.stdout.write(alone())
