# SPDX-License-Identifier: BSD-3-Clause
"""How hosts of an engine meet, and what they are started with."""

import asyncio
import importlib
import json
import queue
import re
import socket
import subprocess
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from engine import stub_of_vllm
from faults import AMPLE
from tiers import tiers
from tree_attention.vllm import __main__ as program
from tree_attention.vllm import hosts, register

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def meet(
    notes: list[dict[str, Any]],
    ranks: list[int] | None = None,
    nnodes: Sequence[int] | None = None,
) -> list[str | None]:
    """What each host with its note raises, or None; they come one after the other."""
    port, errors = free_port(), [None] * len(notes)
    said: list[str] = []
    met: list[hosts.Meeting] = []  # the first host's serves the store to which the others connect
    nnodes = nnodes or [len(notes)] * len(notes)

    def run(index: int, rank: int) -> None:
        try:
            place = "127.0.0.1", port, rank, nnodes[index]
            met.append(hosts.meet(*place, notes[index], said.append))
        except ValueError as error:
            errors[index] = str(error)

    ranks = ranks or list(range(len(notes)))
    threads = [threading.Thread(target=run, args=(i, rank)) for i, rank in enumerate(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return errors


def test_hosts_that_are_alike_meet() -> None:
    assert meet([{"vllm": "0.32.0", "--dtype": "bfloat16"}] * 3) == [None] * 3


def test_the_option_that_differs_is_named_on_every_host() -> None:
    errors = meet([{"--max-model-len": "8192"}, {"--max-model-len": "4096"}])
    for error in errors:
        assert "--max-model-len must be equal on all hosts, got '8192' on" in error
        assert "and '4096' on" in error and error.endswith("--node-rank 1")


@pytest.mark.deep
def test_a_version_that_one_host_lacks() -> None:
    assert all("got '2.13' on" in error for error in meet([{"torch": "2.13"}, {}]))


def test_a_version_whose_notes_are_other_ones() -> None:
    store = dist.HashStore()
    store.set("note 1", json.dumps({"host": "host1"}))
    with pytest.raises(ValueError, match="--dtype must be equal on all hosts, got 'float32' on"):
        hosts._exchange(store, 0, 0, 2, {"--dtype": "float32"}, print, 60.0, print)


def test_two_hosts_with_one_rank() -> None:
    errors = meet([{}] * 3, ranks=[0, 1, 1])
    same = "--node-rank must be different on each of 3 hosts, got 1 twice"
    assert all(same in str(error) or "left before all were there" in str(error) for error in errors)
    assert any(same in str(error) for error in errors)


@pytest.mark.deep
@pytest.mark.parametrize("numbers", [(2, 3), (3, 2)])
def test_hosts_that_expect_different_numbers(numbers: tuple[int, int]) -> None:
    """Neither waits for hosts that the other does not know of."""
    notes = [{"--nnodes": str(number)} for number in numbers]
    for error in meet(notes, nnodes=numbers):
        assert f"--nnodes must be equal on all hosts, got '{numbers[0]}' on" in str(error)


@pytest.mark.deep
def test_a_host_that_leaves_while_all_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its note is there, and the first host does not wait for it without an end."""
    monkeypatch.setattr(hosts, "MEETING_SECONDS", 1.0)
    store = dist.HashStore()
    store.set("note 1", json.dumps({"host": "host1", "is loopback": False, "port": 0}))
    with pytest.raises(ValueError, match="no host with --node-rank 1 came in 1 s"):
        hosts._exchange(store, 0, 0, 2, {}, print, 60.0, print)


def test_an_address_that_no_other_host_reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where /etc/hosts gives the first host's own name the address 127.0.1.1."""
    monkeypatch.setenv("VLLM_HOST_IP", "127.0.0.1")
    store = dist.HashStore()
    store.set("note 1", json.dumps({"host": "host1 (10.0.0.2)", "is loopback": False, "port": 0}))
    here = re.escape(f"{socket.gethostname()} (127.0.0.1)")
    with pytest.raises(ValueError, match=f"VLLM_HOST_IP must be an .* got {here}: set it there"):
        hosts._exchange(store, 0, 0, 2, {}, print, 60.0, print)


@pytest.mark.deep
def test_a_host_that_never_comes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="no host with --node-rank 1 came in 1 s"):
        hosts.meet("127.0.0.1", free_port(), 0, 2, {}, print, start_seconds=1.0)


@pytest.mark.deep
def test_nobody_at_the_address() -> None:
    begin = time.monotonic()
    with pytest.raises(ValueError, match=r"no answer from 127.0.0.1:\d+ in 5 s: start --node-rank"):
        hosts.meet("127.0.0.1", free_port(), 1, 2, {}, print, seconds=5.0)
    assert time.monotonic() - begin < 9  # a store that is told 5 s waits for 11


@pytest.mark.parametrize(
    ("used", "options"),
    [
        ("--host and --port", {"host": "127.0.0.1", "port": None}),
        ("--host and --port", {"port": None}),
        ("--master-addr and --master-port", {"nnodes": 2, "master_port": None}),
    ],
)
def test_a_port_in_use(used: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told before vLLM is imported, and looked at again after that."""
    monkeypatch.setenv("TREE_ATTENTION_VLLM", "0")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        options = {name: value or port for name, value in options.items()}
        sentence = rf"{used} must be .* a free port, got [\d.]+:{port}: Address already in use"
        words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        with pytest.raises(ValueError, match=sentence):
            program.check_early(["m", *words])
        with pytest.raises(ValueError, match=sentence):
            program.prepare(Namespace(**OPTIONS | options))


def test_an_address_that_is_not_the_first_hosts() -> None:
    with pytest.raises(ValueError, match=r"--master-addr and --master-port must be an address of"):
        program.check_early(["m", "--nnodes=2", "--master-addr=192.0.2.1"])
    with pytest.raises(ValueError, match=r"name must be an address .*, got 127.0.0.1:70000: .*655"):
        hosts.check_free("127.0.0.1", 70000, "name")


def test_the_pages_look_at_vllms_port() -> None:
    """Which is not the one that `doctor` takes by itself."""
    docs = ROOT / "docs"
    of_vllm = (docs / "troubleshooting.md").read_text().partition("## vLLM on several hosts")[2]
    text = (docs / "vllm.md").read_text() + of_vllm.partition("\n## ")[0]
    ports = re.findall(r"doctor --(?:listen|peer host0):? ?(\d*)", text)
    assert len(ports) == 4 and set(ports) == {"29501"}


@pytest.mark.deep
def test_somebody_else_at_the_address() -> None:
    """Who takes the connection and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port, begin = silent.getsockname()[1], time.monotonic()
        with pytest.raises(ValueError, match=r"no answer from 127.0.0.1:\d+ in 2 s: start --node-"):
            hosts.meet("127.0.0.1", port, 1, 2, {}, print, seconds=2.0)
        assert time.monotonic() - begin < AMPLE


def test_hosts_know_each_other_and_a_store_of_their_own() -> None:
    port, found = free_port(), {}

    def run(rank: int) -> None:
        found[rank] = hosts.meet("127.0.0.1", port, rank, 2, {}, print)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(AMPLE)
    name = hosts.name_of_this()
    for rank in range(2):
        assert found[rank].names == [f"{name}, --node-rank {other}" for other in range(2)]
    found[0].store.set("key", "value")
    assert found[1].store.get("key") == b"value"
    hosts.check_free("127.0.0.1", port, "vLLM's own store")


@pytest.mark.parametrize(
    "cpus, processes, binding",
    [
        ([0, 1, 2, 3], 1, "0,1,2,3"),
        ([0, 1, 2, 3], 2, "0,1|2,3"),
        ([0, 1, 2], 2, "0|1"),
        ([4, 5], 4, "4|5|4|5"),
    ],
)
def test_processors_of_each_process(cpus: list[int], processes: int, binding: str) -> None:
    assert program.binding(cpus, processes) == binding


def test_processes_share_no_core_and_no_socket(tmp_path: Path) -> None:
    """Two sockets of two cores with two threads, as Linux numbers them."""
    for cpu in range(8):
        topology = tmp_path / f"cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text(f"{cpu % 4 // 2}\n")
        (topology / "core_id").write_text(f"{cpu % 2}\n")
    cpus = program.in_place(range(8), tmp_path)
    assert program.binding(cpus, 2) == "0,4,1,5|2,6,3,7"
    assert program.binding(program.in_place({3, 1, 2}, tmp_path / "none"), 3) == "1|2|3"


OPTIONS = {
    "model_tag": "m",
    "nnodes": 1,
    "node_rank": 0,
    "master_addr": "127.0.0.1",
    "master_port": 29501,
    "headless": False,
    "tensor_parallel_size": 2,
    "pipeline_parallel_size": 1,
    "prefill_context_parallel_size": 1,
    "data_parallel_size": 1,
    "data_parallel_size_local": None,
    "data_parallel_rank": None,
    "data_parallel_multi_port_external_lb": False,
    "cpu_distributed_timeout_seconds": None,
    "host": None,
    "port": 0,
    "uds": None,
}


@pytest.mark.parametrize(
    "options, processes",
    [
        ({}, 2),
        ({"nnodes": 2}, 1),
        ({"data_parallel_size": 2}, 4),  # vLLM takes as many parts for each engine
        ({"data_parallel_size": 4, "data_parallel_size_local": 3}, 6),
        ({"data_parallel_size": 2, "data_parallel_rank": 1}, 2),
        ({"data_parallel_size": 2, "data_parallel_multi_port_external_lb": True}, 2),
        ({"data_parallel_size": 2, "nnodes": 2}, 2),
        ({"pipeline_parallel_size": 3, "nnodes": 2}, 3),
    ],
)
def test_number_of_processes(options: dict[str, Any], processes: int) -> None:
    assert program.processes_of(Namespace(**OPTIONS | options)) == processes


@pytest.mark.parametrize(
    "options, message",
    [
        ({"node_rank": 2, "nnodes": 2}, "--node-rank must be from 0 to 1, below --nnodes, got 2"),
        ({"node_rank": 1, "headless": True}, "--node-rank must be from 0 to 0, .* got 1"),
        ({"node_rank": 1, "nnodes": 2}, "--headless must be given with --node-rank 1"),
        ({"headless": True, "nnodes": 2}, "--headless must not be given with --node-rank 0"),
        (
            {"nnodes": 2, "cpu_distributed_timeout_seconds": 4},
            "--cpu-distributed-timeout-seconds must be at least 5, got 4",
        ),
    ],
)
def test_options_with_which_hosts_would_wait(
    options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TREE_ATTENTION_VLLM", "0")
    with pytest.raises(ValueError, match=message):
        program.prepare(Namespace(**OPTIONS | options))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "the first argument must be serve, got nothing"),
        (["m", "serve"], "the first argument must be serve, got 'm'"),
        (["serve"], "MODEL is missing: serve MODEL [options of vllm serve]"),
        (["serve", "", "--headless"], "MODEL is missing: serve MODEL [options of vllm serve]"),
        (["serve", "/no/model"], "MODEL must be a directory, or the name of a model on the Hugg"),
        (["serve", "./examples/passkey-lama"], "MODEL must be a directory, or the name of a model"),
        (["serve", "m", "--nnodes=2", "--master_addr", "no.invalid"], "--master-addr must be the"),
        (["serve", "m", "-n", "2", "--master-addr", "a..b"], "--master-addr must be the name or"),
        (
            ["serve", "m", "--node-rank", "3"],
            "--node-rank must be from 0 to 0, below --nnodes, got",
        ),
        (["serve", "m", "--nnodes", "2", "-r", "1"], "--headless must be given with --node-rank 1"),
        (["serve", "m", "--nnodes", "0"], "--nnodes must be at least 1, got 0"),
        (
            ["serve", "m", "--port", "70000"],
            "--host and --port must be an address of this host and",
        ),
        (
            ["serve", "m", "-n", "2", "--master-port", "0"],
            "--master-port must be from 1 to 65535, g",
        ),
    ],
)
def test_mistakes_that_show_without_vllm(
    arguments: list[str],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are told before vLLM is imported, which takes half a minute of a processor."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    assert program.main(arguments) == 2
    *usage, last = capsys.readouterr().err.splitlines()
    assert last.startswith(f"tree_attention.vllm: error: {sentence}")
    assert "\n".join(usage).rstrip() == program.USAGE.rstrip() * (arguments[:1] != ["serve"])
    meant = last.endswith("; did you mean examples/passkey-llama?")
    assert meant == ("./examples/passkey-lama" in arguments)


def test_a_mistake_imports_no_torch() -> None:
    """Which takes seconds of a processor."""
    words = "'tree_attention.vllm', 'serve', 'm', '--master-addr', 'no.invalid', '--nnodes', '2'"
    program = f"""
import runpy, sys
sys.argv = [{words}]
try:
    runpy.run_module("tree_attention.vllm", run_name="__main__", alter_sys=True)
except SystemExit as leaving:
    assert leaving.code == 2 and not {{"torch", "vllm"}} & set(sys.modules), sys.modules.keys()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("tree_attention.vllm: error: --master-addr must be the name")


def test_a_number_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        program.main(["serve", "m", "--nnodes", "two"])
    usage, error = capsys.readouterr().err.splitlines()
    assert usage == "usage: python -m tree_attention.vllm serve MODEL [options of vllm serve]"
    assert "argument --nnodes/-n: invalid int value: 'two'" in error


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (None, "MODEL is missing"),
        ("/no/model", "MODEL must be a directory, or the name of a model"),
    ],
)
def test_a_model_that_only_vllms_parser_finds(
    model: str | None, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without one, as where a variable of the shell is empty, vLLM would take its own default."""
    monkeypatch.setenv("TREE_ATTENTION_VLLM", "0")
    words = ["--port", "0", "--dtype", "float32", *([] if model is None else [model])]
    program.check_early(words)
    with pytest.raises(ValueError, match=sentence):
        program.prepare(Namespace(**OPTIONS | {"model_tag": model}))


def test_a_model_of_a_file_alone() -> None:
    for words, model in ((["--config", "f.yaml"], "m"), (["--config=f.yaml"], None), ([], None)):
        asked = Namespace(model_tag=None, model="m")
        program.take_model_of_file(asked, words)
        assert asked.model_tag == model
    program.check_early(["--config", "f.yaml", "--port", "0"])


def test_what_is_left_to_vllm() -> None:
    """vLLM's own options, and options that its --config file may have."""
    program.check_early(
        ["m", "--port=0", "--dtype", "float32", "--served-model-name", "a", "--x.y=1"]
    )
    program.check_early(["m", "--config", "file.yaml", "--node-rank", "3"])
    for word in ("-h", "--help", "--help=ModelConfig"):  # also where a server has its port
        program.check_early([word, "--port", "70000"])
    for words in (["--shares", "3,1"], ["--shares=auto"]):
        with pytest.raises(ValueError, match="--shares must be left out: vLLM's block manager giv"):
            program.check_early(["m", *words])


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["--help"]) == 0
    assert capsys.readouterr().out == program.USAGE


def test_without_vllm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert program.main(["serve", "m", "--port", "0"]) == 2
    assert "vLLM is not installed in this environment: see docs/vllm.md" in capsys.readouterr().err


def test_secrets_and_what_differs_stay_on_their_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREE_ATTENTION_VLLM", "1")
    secrets = {"hf_token": "secret", "model_loader_extra_config": {"key": "secret"}}
    asked = Namespace(
        **secrets, model="", model_tag="m", max_model_len=512, nnodes=2, node_rank=1, api_key="k"
    )
    with stub_of_vllm():
        note = program.note_of(asked)
    assert {name for name in note if name.startswith("--")} == {"--max-model-len", "--nnodes"}
    assert "secret" not in json.dumps(note)


def test_a_line_says_whose_attention_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    monkeypatch.setenv("TREE_ATTENTION_VLLM", "0")
    program.prepare(Namespace(**OPTIONS))
    said = capsys.readouterr().err
    assert said.endswith("TREE_ATTENTION_VLLM is '0', so attention is vLLM's own; processors 0|1\n")
    monkeypatch.setenv("TREE_ATTENTION_VLLM", "1")
    with stub_of_vllm():
        with pytest.raises(ValueError, match="VLLM_PLUGINS must be unset or name tree_attention"):
            program.prepare(Namespace(**OPTIONS))
        register()
        program.prepare(Namespace(**OPTIONS))
    said = capsys.readouterr().err
    assert ": attention by tree_attention " in said and said.endswith("); processors 0|1\n")


@pytest.mark.parametrize("case", tiers(["lost", "told to end"], ["lost, as vLLM saw first"]))
def test_a_server_knows_why_its_engine_ended(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, server = Namespace(is_running=True, errored=False), Namespace(should_exit=False)
    watch, left = Namespace(was_told=False), queue.Queue()
    monkeypatch.setattr(program, "SERVER_SECONDS", 0.0)
    monkeypatch.setattr(program, "leave_as", lambda whose, was_told: left.put((whose, was_told)))

    def end() -> None:
        engine.is_running, engine.errored = False, True

    engine.shutdown = end
    with stub_of_vllm():
        lost = program.watch_engine(watch)
        watchdog_loop = importlib.import_module(program.LAUNCHER).watchdog_loop

        async def serve() -> None:
            watchdog = asyncio.create_task(watchdog_loop(server, engine))
            await asyncio.sleep(0.3)
            assert not lost.is_set() and not server.should_exit
            if case == "told to end":
                await asyncio.to_thread(engine.shutdown)  # as vLLM does
            else:
                end()
            if case == "lost, as vLLM saw first":
                watchdog.cancel()
            await asyncio.wait([watchdog])

        asyncio.run(serve())
    assert lost.is_set() == (case != "told to end") != watch.was_told
    assert server.should_exit == (case != "lost, as vLLM saw first")
    if case != "lost, as vLLM saw first":  # and the server's clients keep it
        assert left.get(timeout=AMPLE) == (watch, case == "told to end")
    assert left.empty()


def test_a_server_that_ends_by_itself_was_not_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes its engine down, as one does that was told to end; that one does so in another
    thread first. Nothing is awaited in between, as in vLLM."""
    left: list[bool] = []
    monkeypatch.setattr(program, "SERVER_SECONDS", 0.0)
    monkeypatch.setattr(program, "leave_as", lambda whose, was_told: left.append(was_told))
    watch = Namespace(was_told=False)

    async def serve(engine: Namespace, times_told: int) -> None:
        server = Namespace(should_exit=False)
        watchdog = asyncio.create_task(loop(server, engine))
        await asyncio.sleep(0.1)
        for _ in range(times_told):
            await asyncio.to_thread(engine.shutdown)
        watchdog.cancel()
        engine.shutdown()
        await asyncio.wait([watchdog])
        await asyncio.to_thread(engine.shutdown)  # as the engine's finalizer does in any thread

    with stub_of_vllm():
        lost = program.watch_engine(watch)
        loop = importlib.import_module(program.LAUNCHER).watchdog_loop
        for times_told in (0, 2):
            calls: list[None] = []
            engine = Namespace(is_running=True, errored=False, shutdown=lambda: calls.append(None))  # noqa: B023
            asyncio.run(serve(engine, times_told))
            for thread in threading.enumerate():
                if thread.name == "tree_attention end":
                    thread.join(AMPLE)
            assert len(calls) == times_told + 2 and not lost.is_set()
            assert left == [True] * (times_told > 0) and watch.was_told == (times_told > 0)


@pytest.mark.parametrize(("was_told", "status"), [(True, 0), (False, program.LOST_STATUS)])
def test_the_status_of_a_server_on_one_host(
    was_told: bool, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[int] = []
    monkeypatch.setattr(program, "end_children", lambda: None)
    monkeypatch.setattr(program, "leave", left.append)
    program.leave_as(None, was_told=was_told)
    assert left == [status]


def test_a_name_of_no_host() -> None:
    with pytest.raises(ValueError, match=r"--master-addr must be the name .* got 'no\.invalid': "):
        hosts.address_towards("no.invalid", 1)


def test_the_interface_of_an_address() -> None:
    assert hosts.address_towards("127.0.0.1", 1) == "127.0.0.1"
    assert program.interface_of("127.0.0.1") == "lo"
    with pytest.raises(ValueError, match="VLLM_HOST_IP must be an address of this host, got '192"):
        program.interface_of("192.0.2.1")
