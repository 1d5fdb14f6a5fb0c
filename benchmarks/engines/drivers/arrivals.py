# SPDX-License-Identifier: BSD-3-Clause
"""Requests at random times: `python -m benchmarks.engines.drivers.arrivals SPEC`.

SPEC is JSON: `prompts`, which are token ids, the `requests` in all, how many come in a second on
average (`rate`), the new `tokens` of each and after how many answers a line is printed (`every`).
Each prompt is asked for alone first; the line counts answers that equal that one, others and losses
since the line before, with the reasons, and the seconds until the first and last token of each.
"""

import asyncio
import json
import random
import sys
from typing import Any

import httpx
from openai import AsyncOpenAI, DefaultAsyncHttpxClient, OpenAIError

from .client import ask


class Client:
    def __init__(self, spec: dict[str, Any]) -> None:
        self._spec = spec
        self._server = AsyncOpenAI(
            base_url="http://localhost:8000/v1",
            api_key="none",
            max_retries=0,
            timeout=120,
            # Shorter than the server's 5 s: a request on a connection that the server is about to
            # close fails, which the client by default tries again.
            http_client=DefaultAsyncHttpxClient(limits=httpx.Limits(keepalive_expiry=1.0)),
        )
        self._alone: list[list[int]] = []
        self._answered = 0
        self._clear()

    async def run(self) -> None:
        for prompt in self._spec["prompts"]:
            self._alone.append((await self._ask(prompt))["tokens"])
        self._print()
        source = random.Random(0)
        requests = []
        for _ in range(self._spec["requests"]):
            await asyncio.sleep(source.expovariate(self._spec["rate"]))
            index = source.randrange(len(self._alone))
            requests.append(asyncio.create_task(self._request(index)))
        await asyncio.gather(*requests)

    async def _request(self, index: int) -> None:
        try:
            answer = await self._ask(self._spec["prompts"][index])
            is_same = answer["tokens"] == self._alone[index]
            self._counts["same" if is_same else "other"] += 1
            self._first.append(answer["seconds"][0])
            self._last.append(answer["seconds"][-1])
        except (OpenAIError, IndexError) as error:  # of the server, or no token came
            self._counts["lost"] += 1
            self._reasons.append(f"{type(error).__name__}: {error} {error.__cause__!r}")
        self._answered += 1
        if self._answered % self._spec["every"] == 0:
            self._print()

    async def _ask(self, prompt: list[int]) -> dict[str, Any]:
        return await ask(self._server, prompt, self._spec["tokens"])

    def _print(self) -> None:
        found = {
            "answered": self._answered,
            **self._counts,
            "reasons": self._reasons,
            "first_token_seconds": self._first,
            "last_token_seconds": self._last,
        }
        print(json.dumps(found), flush=True)
        self._clear()

    def _clear(self) -> None:
        self._counts = {"same": 0, "other": 0, "lost": 0}
        self._reasons: list[str] = []
        self._first: list[float] = []
        self._last: list[float] = []


if __name__ == "__main__":
    asyncio.run(Client(json.loads(sys.argv[1])).run())
