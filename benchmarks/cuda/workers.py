# SPDX-License-Identifier: BSD-3-Clause
"""How long a short context takes by the number of blocks that share it: fewer of them have fewer
partial states to merge, more of them read faster. `python -m benchmarks.cuda.workers --out DIR`"""

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tree_attention import lean_decode

from ..harness.measure import InputArena
from .cases import LATENCY
from .inputs import Inputs, num_sets
from .timing import Call, measure

NUM_WORKERS = (0, 34, 68, 136, 264)


def run() -> dict[str, dict[str, Any]]:
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    sets = num_sets(LATENCY.read_bytes, l2_bytes)
    inputs = Inputs(LATENCY, InputArena(sets * LATENCY.set_bytes, "cuda"), sets)

    def call(num_workers: int, i: int) -> Any:
        kv = inputs.sets[i]
        return lean_decode(inputs.q, kv.k, kv.v, num_workers=num_workers)

    calls: dict[str, Call] = {str(n): partial(call, n) for n in NUM_WORKERS}
    measured = measure(calls, sets, 1.0)
    if measured.failed:
        raise RuntimeError(str(measured.failed))
    return {
        name: {"graph": times.graph.to_json(), "eager": times.eager.to_json()}
        for name, times in measured.measured.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="writes workers.json there")
    out = parser.parse_args().out
    with torch.inference_mode():
        found = run()
    (out / "workers.json").write_text(json.dumps(found, indent=1))
    print(", ".join(f"{name}: {x['graph']['median_us']:.2f} us" for name, x in found.items()))


if __name__ == "__main__":
    main()
