# SPDX-License-Identifier: BSD-3-Clause
"""Cut, lossy and slow links of an emulated cluster: an error on every rank in time, or the result.

Three hosts, the last one in a node of its own, each a rank; host 0 also serves the store.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lab.emulation import EmulatedCluster, LinkSpec, Wiring, unsupported

ROOT = Path(__file__).parents[3]
DELAY = 0.02
LEVELS = Wiring(LinkSpec(DELAY, 1e9), LinkSpec(0.004, 1e9), per_node=2)

RANK = """
import os, sys, time
import torch, torch.distributed as dist
from tree_attention import ExchangeError
from tree_attention.exchange import Communicator

dist.init_process_group("gloo")
for line in sys.stdin:
    strategy, rows, timeout = line.split()
    comm = Communicator(dist.new_group([0, 1, 2]), float(timeout))
    o, lse = torch.ones(1, int(rows), 1, 128), torch.zeros(1, int(rows), 1)
    comm.all_merge_states(o[:, :8], lse[:, :8], strategy=strategy, timeout=20)
    print(comm.topology, flush=True)
    sys.stdin.readline()
    begin = time.monotonic()
    try:
        for _ in range(2):  # who is not next to the fault may have one result
            merged, _ = comm.all_merge_states(o, lse, strategy=strategy)
            assert (merged == 1).all()
        said = "results"
    except ExchangeError as error:
        said = f"error: {error}"
    print(f"{time.monotonic() - begin} {said}", flush=True)
os._exit(0)  # connections of lost peers would delay the end
"""


class Ranks:
    def __init__(self, cluster: EmulatedCluster, program: Path) -> None:
        self.relay = cluster.relay
        environment = {"PYTHONPATH": str(ROOT / "python"), "OMP_NUM_THREADS": "1"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        command = [sys.executable, str(program)]
        self._ranks = [cluster.start(host, command, environment, **pipes) for host in range(3)]

    def exchange(
        self, strategy: str, timeout: float, break_link: Callable[[], None], rows: int = 8,
        after: float | None = None,
    ) -> list[str]:  # fmt: skip
        """Return what ranks say of an exchange after `break_link`, or while it is called in it."""
        self._tell(f"{strategy} {rows} {timeout}")
        assert [rank.stdout.readline() for rank in self._ranks] == ["2 nodes of 1 or 2 ranks\n"] * 3
        if after is None:
            break_link()
        self._tell("go")
        if after is not None:
            time.sleep(after)
            break_link()
        answers = [rank.stdout.readline().split(maxsplit=1) for rank in self._ranks]
        assert all(float(seconds) < 2 * timeout + 8 for seconds, _ in answers), answers
        return [said for _, said in answers]

    def close(self) -> None:
        for rank in self._ranks:
            rank.communicate(timeout=240)

    def _tell(self, line: str) -> None:
        for rank in self._ranks:
            rank.stdin.write(line + "\n")
            rank.stdin.flush()


@contextmanager
def ranks_on_hosts(folder: Path) -> Iterator[Ranks]:
    if (why := unsupported()) is not None:
        pytest.skip(why)
    program = folder / "rank.py"
    program.write_text(RANK)
    with EmulatedCluster(LEVELS, 3) as cluster:
        yield Ranks(cluster, program)


def assert_all_failed(answers: list[str]) -> None:
    assert all(said.startswith("error: rank ") for said in answers), answers


def test_links_between_ranks(tmp_path: Path) -> None:
    """Real latency; each fault with a group of its own, which the one before leaves usable."""
    with ranks_on_hosts(tmp_path) as ranks:
        relay = ranks.relay
        # TCP sends again what is lost, which may take too long.
        answers = ranks.exchange("two_phase", 2.0, lambda: relay.lose(1, 2, 0.3))
        assert all(said == "results\n" or said.startswith("error: rank ") for said in answers)
        relay.lose(1, 2, 0.0)
        assert_all_failed(ranks.exchange("butterfly", 0.8, lambda: relay.lose(1, 2, 1.0)))
        relay.lose(1, 2, 0.0)
        assert_all_failed(ranks.exchange("hierarchical", 0.8, lambda: relay.delay(1, 2, 4.0)))
        relay.delay(1, 2, DELAY)
        # 64 MiB to each of two: a second on these links.
        cut = ranks.exchange("all_gather", 2.0, lambda: relay.cut(1, 2), rows=1 << 17, after=0.1)
        assert_all_failed(cut)
        relay.mend(1, 2)

        def cut_off_the_store() -> None:
            relay.cut(0, 1)
            relay.cut(0, 2)

        assert_all_failed(ranks.exchange("three_allreduce", 0.8, cut_off_the_store))
        for host in (1, 2):
            relay.mend(0, host)
        ranks.close()
