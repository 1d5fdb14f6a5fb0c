# SPDX-License-Identifier: BSD-3-Clause
"""`python -m lab.emulation --hosts 8 -- COMMAND`: COMMAND on each of 8 emulated hosts."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys

from benchmarks.harness import LAUNCHER

from .hosts import EmulatedCluster, exit_on_sigterm
from .network import Unsupported, remove_orphans, unsupported
from .probe import probe
from .wiring import LINKS, Wiring, parse_link


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m lab.emulation",
        description="Runs a command on every host of an emulated cluster, as srun would; without "
        "one, measures the links. Hosts are called host0, host1, ... and reach each other by "
        "device net0. RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set for one rank per host; "
        "torchrun sets its own.",
    )
    parser.add_argument("--hosts", type=int, default=2, metavar="N")
    parser.add_argument(
        "--link",
        default="metro",
        help=f"{', '.join(f'{name} ({wiring})' for name, wiring in LINKS.items())}; or "
        "DELAY,RATE between nodes, as 1ms,1gbit (default metro)",
    )
    parser.add_argument("--per-node", type=int, metavar="N", help="hosts of a node; with --near")
    parser.add_argument("--near", metavar="DELAY,RATE", help="link inside a node")
    parser.add_argument("--label", action="store_true", help="print the host before each line")
    parser.add_argument("--clean", action="store_true", help="remove hosts of killed runs, end")
    options, command = arguments, []
    if "--" in arguments:
        position = arguments.index("--")
        options, command = arguments[:position], arguments[position + 1 :]
    parsed = parser.parse_args(options)
    try:
        wiring = wiring_of(parsed.link, parsed.near, parsed.per_node)
    except ValueError as error:
        parser.error(str(error))
    if (why := unsupported()) is not None:
        print(why, file=sys.stderr)
        return 2
    if parsed.clean:
        remove_orphans()
        return 0
    exit_on_sigterm()
    try:
        with EmulatedCluster(wiring, parsed.hosts) as cluster:
            print(f"{parsed.hosts} hosts: {wiring}", file=sys.stderr, flush=True)
            if command:
                launcher = shlex.join(["python", "-m", "lab.emulation", *options, "--"])
                return cluster.run(command, {LAUNCHER: launcher}, label=parsed.label)
            return measure(cluster)
    except (Unsupported, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def wiring_of(link: str, near: str | None, per_node: int | None) -> Wiring:
    """
    Raises:
        ValueError: the options do not fit each other.
    """
    if (near is None) != (per_node is None):
        raise ValueError("--near and --per-node belong together")
    if link in LINKS:
        if near is not None:
            raise ValueError("--near and --per-node go with --link DELAY,RATE")
        return LINKS[link]
    if near is None or per_node is None:
        return Wiring(parse_link(link))
    return Wiring(parse_link(link), parse_link(near), per_node)


def measure(cluster: EmulatedCluster) -> int:
    """Prints what one link of each level is like, median and 10th to 90th percentile."""
    if cluster.num_hosts < 2:
        print("one host has no link", file=sys.stderr)
        return 2
    last = cluster.num_hosts - 1
    others = [1, last] if cluster.wiring.link(0, 1) != cluster.wiring.link(0, last) else [last]
    for other in others:
        print(probe(cluster, 0, other))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
