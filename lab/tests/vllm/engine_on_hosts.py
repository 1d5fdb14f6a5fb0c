# SPDX-License-Identifier: BSD-3-Clause
"""vLLM's engine on several hosts of this machine: starts it, asks it, and loses hosts.

The hosts are network namespaces with a link of 0.1 ms and 10 Gb/s where they can be made, and else
processes on the loopback device.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))  # for the emulated hosts

from lab.emulation.hosts import EmulatedCluster  # noqa: E402
from lab.emulation.network import unsupported  # noqa: E402
from lab.emulation.wiring import Wiring, parse_link  # noqa: E402
from tree_attention.vllm.watch import LOST_STATUS  # noqa: E402

TIMEOUT = 6  # seconds of --cpu-distributed-timeout-seconds
END_SECONDS = TIMEOUT + 2  # after which no process is left when a host is lost
READY_SECONDS = 600  # in which a server starts beside other work; to import vLLM takes minutes then
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
IS_EMULATED = unsupported() is None
HOST0 = "host0" if IS_EMULATED else "127.0.0.1"
# Prints the tokens of each prompt, which come one by one but for those of the first prompt, or the
# errors of the client.
CLIENT = """
import asyncio, json, sys
from openai import AsyncOpenAI
client = AsyncOpenAI(
    base_url="http://localhost:8000/v1", api_key="none", max_retries=0, timeout=120)
job = json.load(sys.stdin)
async def ask_for_all(prompt):
    found = await client.completions.create(
        model="m", prompt=prompt, max_tokens=job["tokens"], temperature=0.0,
        extra_body={"return_token_ids": True, "ignore_eos": True})
    return found.choices[0].token_ids
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
    first, *others = job["prompts"]
    asked = (ask_for_all(first), *map(ask, others))
    return await asyncio.gather(*asked, return_exceptions=True)
found = asyncio.run(main())
for error in found:
    if isinstance(error, Exception): print("error", type(error).__name__, error)
print("tokens", json.dumps(found, default=str))
"""


class Loopback:
    """Hosts that are all this one."""

    def start(
        self, host: int, command: list[str], environment: Mapping[str, str], **options: Any
    ) -> subprocess.Popen[Any]:
        variables = {**os.environ, **environment}
        return subprocess.Popen(command, env=variables, start_new_session=True, **options)


class Hosts:
    def __init__(self, cluster: Any, directory: Path, num_hosts: int) -> None:
        self.cluster, self.directory, self.num_hosts = cluster, directory, num_hosts
        self.servers: list[subprocess.Popen[Any]] = []

    def start(
        self, host: int, command: list[str], environment: Mapping[str, str] = ENVIRONMENT
    ) -> subprocess.Popen[Any]:
        with (self.directory / f"{host}.log").open("w") as log:
            server = self.cluster.start(
                host, command, environment, stdout=log, stderr=subprocess.STDOUT
            )
        self.servers.append(server)
        return server

    def serve(self, model: Path, *options: str) -> None:
        """Starts the engine on all hosts and waits for its server."""
        for host in range(self.num_hosts):
            more = ("--headless",) if host else ()
            self.start(host, self.command(model, host, *options, *more))
        self.wait_until_ready()

    def command(self, model: Path, host: int, *options: str) -> list[str]:
        return [
            *(sys.executable, "-m", "tree_attention.vllm", "serve", str(model)),
            *OF_ALL,
            *("--cpu-distributed-timeout-seconds", str(TIMEOUT), "--master-addr", HOST0),
            *("--nnodes", str(self.num_hosts), "--node-rank", str(host), *options),
        ]

    def wait_until_ready(self) -> None:
        end = time.monotonic() + READY_SECONDS
        while "Application startup complete" not in self.log(0):
            assert time.monotonic() < end, self.logs()
            assert all(server.poll() is None for server in self.servers), self.logs()
            time.sleep(0.5)

    def client(self, prompts: list[list[int]], tokens: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", CLIENT]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        client = self.cluster.start(0, command, ENVIRONMENT, text=True, **pipes)
        client.stdin.write(json.dumps({"prompts": prompts, "tokens": tokens}))
        client.stdin.close()
        return client  # type: ignore[no-any-return]

    def tokens(self, prompts: list[list[int]], tokens: int) -> Any:
        output = self.client(prompts, tokens).stdout.read()
        assert "tokens " in output, output + self.logs()
        return json.loads(output.rpartition("tokens ")[2])

    def processes(self, host: int) -> list[int]:
        """The processes of a host that run, which are of one session."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):  # it ended meanwhile
                state, _, _, session, *_ = stat.read_text().rpartition(")")[2].split()
                if int(session) == self.servers[host].pid and state != "Z":
                    found.append(int(stat.parent.name))
        return found

    def signal(self, host: int, number: int) -> None:
        for process in self.processes(host):
            with suppress(ProcessLookupError):
                os.kill(process, number)

    def lose(self, lost: int, number: int, prompts: list[list[int]]) -> None:
        """Kills or stops a host while a client streams. Every process of the others ends in time,
        they name the lost host, and the client has the errors of the server, or of its connection
        where that host is the one that serves."""
        client = self.client(prompts, tokens=900)
        assert client.stdout.readline() == "streaming\n", self.logs()
        self.signal(lost, number)
        self.check_that_all_end(lost)
        if number == signal.SIGSTOP:  # it ends too once it goes on
            self.signal(lost, signal.SIGCONT)
            print(f"host {lost} went on:", self.seconds_until_ended([lost]))
        begin = time.monotonic()
        output = client.stdout.read()
        errors = re.findall(r"^error (\w+)", output, re.MULTILINE)
        assert time.monotonic() - begin < 2 and len(errors) == len(prompts), output
        if lost:  # HTTP's 500, and in streams that have begun what vLLM sends
            assert errors == ["InternalServerError", *["APIError"] * (len(prompts) - 1)], output
        assert "Timeout" not in output, output

    def check_that_all_end(self, lost: int) -> None:
        others = [host for host in range(self.num_hosts) if host != lost]
        seconds = self.seconds_until_ended(others)
        print(f"host {lost} was lost:", seconds)
        name = rf"host{lost} \(10\.\S+\)" if IS_EMULATED else r".*"
        line = rf"A host is lost: {name}, --node-rank {lost}, (gave no sign|does not answer)"
        for host in others:
            assert re.search(line, self.log(host)), self.logs()
            assert self.servers[host].wait(5) == LOST_STATUS, self.logs()
        assert max(seconds.values()) < END_SECONDS, (seconds, self.logs())

    def stop(self) -> None:
        """Tells the server to end, as supervisors do. All hosts end, and none calls it a loss."""
        os.kill(self.servers[0].pid, signal.SIGTERM)
        print("told to end:", self.seconds_until_ended([*range(self.num_hosts)]))
        for server in self.servers:
            assert server.wait(5) == 0, self.logs()
        assert "is lost" not in self.logs(), self.logs()

    def seconds_until_ended(self, hosts: list[int]) -> dict[int, float]:
        """Of each host, until the last of its processes has ended."""
        begin, seconds = time.monotonic(), {}
        while len(seconds) < len(hosts):
            for host in hosts:
                if host not in seconds and not self.processes(host):
                    seconds[host] = time.monotonic() - begin
            assert time.monotonic() - begin < 60, self.logs()
            time.sleep(0.05)
        return seconds

    def log(self, host: int) -> str:
        path = self.directory / f"{host}.log"
        return path.read_text() if path.exists() else ""

    def logs(self) -> str:
        hosts = range(self.num_hosts)
        return "".join(f"\n== host {host}\n{self.log(host)[-6000:]}" for host in hosts)


# Options of all engines.
OF_ALL = ("--served-model-name", "m", "--dtype", "float32", "--max-model-len", "1024")
OF_ALL += ("--skip-tokenizer-init",)


@contextmanager
def several_hosts(num_hosts: int, directory: Path) -> Iterator[Hosts]:
    @contextmanager
    def cluster() -> Iterator[Any]:
        if IS_EMULATED:
            with EmulatedCluster(Wiring(parse_link("0.1ms,10gbit")), num_hosts) as emulated:
                yield emulated
        else:
            yield Loopback()

    with cluster() as made:
        found = Hosts(made, directory, num_hosts)
        try:
            yield found
        finally:
            for host in range(len(found.servers)):
                for number in (signal.SIGCONT, signal.SIGKILL):
                    found.signal(host, number)
