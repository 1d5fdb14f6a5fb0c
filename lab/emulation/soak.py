# SPDX-License-Identifier: BSD-3-Clause
"""Decoding at three ranks under random faults, for as long as one likes.

    python -m lab.emulation.soak --minutes 30 --out DIR

Each rank is a host of an emulated cluster and compares every result with float64. Ranks are stopped
and links are slow for less than the deadline, which must change nothing; links are cut, and every
rank must raise in time and go on in a new group; ranks are killed, the others must raise in time,
and all are replaced by new processes. Exits with 1 if anything else happens.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from random import Random
from typing import Any

import numpy as np

from benchmarks.harness.program import add_out, finish, progress_bar
from benchmarks.harness.report import Report, columns_of, environment

from .hosts import EmulatedCluster, exit_on_sigterm
from .network import unsupported
from .soak_job import (
    CUT_LINK,
    KILLED,
    KINDS,
    SLACK,
    SLOW_LINK,
    STOPPED,
    WORLD,
    Fault,
    Job,
    Outcome,
    Record,
    Sample,
)
from .soak_rank import DEADLINE
from .wiring import LINKS

LINK = LINKS["metro"]
WEIGHTS = {STOPPED: 10, SLOW_LINK: 10, CUT_LINK: 4, KILLED: 0.5}
WARM_UP = 90.0  # seconds after which the allocator has grown to what the sequences need
FLAT = 1.0  # MB per minute


def random_faults(seed: int) -> Iterator[Fault]:
    random = Random(seed)
    while True:
        (kind,) = random.choices(list(WEIGHTS), list(WEIGHTS.values()))
        rank, other = random.sample(range(WORLD), 2)
        after, seconds = random.uniform(0.2, 4), random.uniform(0.05, 0.5) * DEADLINE
        yield Fault(kind, rank, other, after, seconds, random.uniform(0.005, 0.1))


def soak(seconds: float, faults: Iterable[Fault], seed: int) -> Record:
    """Decodes under faults for so long, or until there are no more."""
    record, begin, number = Record(), time.monotonic(), itertools.count()
    with EmulatedCluster(LINK, WORLD) as cluster, progress_bar(True) as progress:
        task = progress.add_task("", total=int(seconds))
        job: Job | None = None
        for fault in faults:
            elapsed = time.monotonic() - begin
            failures = sum(bool(outcome.failed) for outcome in record.outcomes)
            words = f"{record.results} results, {record.wrong} wrong, {failures} failures"
            progress.update(task, completed=int(elapsed), description=words)
            if elapsed > seconds:
                break
            if job is None:
                job = Job(cluster, record, next(number), seed)
                if failed := job.start_group():
                    record.outcomes.append(Outcome(fault, round(elapsed, 3), {}, failed))
                    break
            outcome = job.suffer(fault, elapsed)
            record.outcomes.append(outcome)
            if outcome.failed or fault.kind == KILLED:
                cluster.stop()
                job = None
    return record


def is_warm(sample: Sample) -> bool:
    # The first error of a process loads what torch describes errors with.
    return sample.seconds > WARM_UP and sample.groups_lost > 0


def growth(memory: Iterable[Iterable[Sample]]) -> float:
    """MB per minute by which processes grow once they are warm, by least squares over all."""
    products = squares = 0.0
    for samples in memory:
        warm = np.array([(s.seconds, s.resident) for s in samples if is_warm(s)])
        if len(warm):
            seconds, resident = (warm - warm.mean(0)).T
            products += float(seconds @ resident)
            squares += float(seconds @ seconds)
    return 60e-6 * products / squares if squares else 0.0


def rows_of(record: Record) -> list[dict[str, Any]]:
    """A row for each kind of fault, one for the results and one for the memory."""
    rows: list[dict[str, Any]] = []
    for kind in KINDS:
        outcomes = [outcome for outcome in record.outcomes if outcome.fault.kind == kind]
        raised = [seconds for outcome in outcomes for seconds in outcome.raised.values()]
        failures = sum(bool(outcome.failed) for outcome in outcomes)
        found = f"{failures} failures"
        if raised:
            middle = statistics.median(raised)
            found += f"; {len(raised)} errors after {middle:.2f} s, at most {max(raised):.2f} s"
        rows.append({"name": kind, "number": len(outcomes), "found": found, "wrong": failures > 0})
    found = f"{record.wrong} wrong"
    wrong = record.wrong > 0 or not record.results
    rows.append({"name": "results", "number": record.results, "found": found, "wrong": wrong})
    slope = growth(record.memory.values())
    warm = sum(is_warm(samples[-1]) for samples in record.memory.values())
    found = f"{slope:+.2f} MB per minute"
    rows.append({"name": "warm processes", "number": warm, "found": found, "wrong": slope > FLAT})
    return rows


def report_of(record: Record, seed: int) -> Report:
    rows = rows_of(record)
    texts = {
        "of": lambda row: row["name"],
        "number": lambda row: f"{row['number']:,}",
        "found": lambda row: row["found"],
        "verdict": lambda row: "WRONG" if row["wrong"] else "right",
    }
    memory = [
        {"job": job, "rank": rank, "samples": samples[::10]}
        for (job, rank), samples in record.memory.items()
    ]
    return Report(
        name="soak",
        title=f"Decoding under faults: {WORLD} ranks, links of {LINK}",
        notes=[
            "stopped, slow link: for less than half of the deadline of "
            f"{DEADLINE:g} s; every rank must go on, without an error",
            f"cut link, killed: every survivor must raise within {DEADLINE + SLACK:g} s; the ranks "
            "form a new group, or are replaced",
            "every result of every rank is compared with attention in float64",
            f"processes are warm after {WARM_UP:g} s and the first lost group; from then on their "
            f"memory must grow by less than {FLAT:g} MB per minute",
        ],
        environment=environment(seed=seed),
        rows=rows,
        columns=columns_of(rows, texts),
        more={"faults": [asdict(outcome) for outcome in record.outcomes], "memory": memory},
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m lab.emulation.soak")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(3), "big"))
    add_out(parser, "soak")
    parsed = parser.parse_args(arguments)
    if (why := unsupported()) is not None:
        print(why, file=sys.stderr)
        return 2
    exit_on_sigterm()
    print(f"--seed {parsed.seed}", file=sys.stderr)
    record = soak(60 * parsed.minutes, random_faults(parsed.seed), parsed.seed)
    return finish(report_of(record, parsed.seed), parsed.out)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
