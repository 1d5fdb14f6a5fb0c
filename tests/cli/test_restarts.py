# SPDX-License-Identifier: BSD-3-Clause
"""Ranks that torchrun starts again (`--max-restarts`) meet and merge, under one agent and two."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed import TCPStore

import tree_attention
from distributed import AMPLE_SECONDS

pytestmark = pytest.mark.deep

# One rank dies after its first exchange. The other is busy then, so that with c10d its agent ends
# it for a new meeting, which is no restart in that agent's count; with static it finds out itself.
PROGRAM = """
import os, pathlib, sys, time
import torch
from tree_attention import all_merge_states
from tree_attention.cli.world import joined_world

dying, busy, folder = int(sys.argv[1]), float(sys.argv[2]), pathlib.Path(sys.argv[3])
with joined_world(timeout=300) as world:
    def merged():
        o = torch.full((1, 1, 1, 1), float(world.rank))
        return all_merge_states(o, torch.zeros(1, 1, 1), timeout=120)[0].item()

    first = merged()
    if not (folder / f"count {world.rank}").exists():
        (folder / f"count {world.rank}").touch()
        if world.rank == dying:
            os._exit(7)
        time.sleep(busy)
    for _ in range(3):
        last = merged()
    count = os.environ["TORCHELASTIC_RESTART_COUNT"]
    (folder / f"count {world.rank}").write_text(f"{count} {first} {last}")
"""


@pytest.mark.parametrize(
    ("kind", "dying", "num_agents"),
    [("c10d", 0, 2), ("c10d", 1, 2), ("static", 1, 2), ("c10d", 1, 1)],
)
def test_a_rank_that_is_lost(kind: str, dying: int, num_agents: int, tmp_path: Path) -> None:
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    port = store.port
    del store  # which frees its port
    rendezvous = [
        "--rdzv-backend",
        "c10d",
        "--rdzv-id",
        "x",
        "--rdzv-endpoint",
        f"127.0.0.1:{port}",
    ]
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    agents = []
    for number in range(num_agents):
        if kind == "static":
            rendezvous = ["--master-addr", "127.0.0.1", "--master-port", str(port)]
            rendezvous += ["--node-rank", str(number)]
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(num_agents)]
        command += ["--nproc-per-node", str(2 // num_agents), "--max-restarts", "2", *rendezvous]
        busy = str(AMPLE_SECONDS) if kind == "c10d" else "0"
        command += [str(program), str(dying), busy, str(tmp_path)]
        package = str(Path(tree_attention.__file__).parents[1])
        variables = {"PYTHONPATH": package, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        agents.append(subprocess.Popen(command, env=os.environ | variables))
    try:
        assert [agent.wait(AMPLE_SECONDS / 2) for agent in agents] == [0] * num_agents
    finally:
        for agent in agents:
            agent.terminate()
            agent.wait()
    ended = [(tmp_path / f"count {rank}").read_text().split() for rank in range(2)]
    counts = [int(count) for count, _, _ in ended]
    assert counts[dying] == 1
    if kind == "c10d" and num_agents == 2:
        assert counts[1 - dying] == 0  # the launchers' counts differ, and the ranks have met
    assert [x[1:] for x in ended] == [["0.5", "0.5"]] * 2
