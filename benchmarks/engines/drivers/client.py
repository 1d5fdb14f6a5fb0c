# SPDX-License-Identifier: BSD-3-Clause
"""A client of an OpenAI server: `python -m benchmarks.engines.drivers.client SPEC`.

SPEC is JSON: `batches` of prompts, which are token ids, and the number of new tokens. Each batch is
asked for at once and streamed; the seconds at which its tokens came are printed.
"""

import asyncio
import json
import sys
import time
from typing import Any

from openai import AsyncOpenAI


async def ask(client: AsyncOpenAI, prompt: list[int], tokens: int) -> dict[str, Any]:
    begin = time.perf_counter()
    stream = await client.completions.create(
        model="m",
        prompt=prompt,
        max_tokens=tokens,
        temperature=0.0,
        stream=True,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    seconds: list[float] = []
    found: list[int] = []
    async for event in stream:
        new = event.choices[0].token_ids or []
        found += new
        seconds += [time.perf_counter() - begin] * len(new)
    return {"seconds": seconds, "tokens": found}


async def main() -> None:
    spec = json.loads(sys.argv[1])
    client = AsyncOpenAI(
        base_url="http://localhost:8000/v1", api_key="none", max_retries=0, timeout=600
    )
    results = [
        await asyncio.gather(*(ask(client, prompt, spec["tokens"]) for prompt in batch))
        for batch in spec["batches"]
    ]
    print(json.dumps(results), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
