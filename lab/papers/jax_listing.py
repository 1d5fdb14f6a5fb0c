# SPDX-License-Identifier: BSD-3-Clause
"""The listing of Tree Attention's Appendix D in JAX, on eight virtual CPU devices, beside ours.

python -m lab.papers.jax_listing --out DIR

Its local attention, a CUDA kernel of FlashAttention-2, is replaced by the formula; what is shown is
how the listing merges: o of `[batch, seqlen, heads, head_dim]` is multiplied by functions of lse of
`[batch, heads, seqlen]` as they are. Mended, lse gets the axes of o first.
"""

import os
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from benchmarks.harness.program import finish, parser_of
from benchmarks.harness.report import Columns, Report, columns_of, environment, verdict
from lab.papers.algorithms.tree import Shard, tree_attention

DEVICES, KEYS, HEAD_DIM = 8, 64, 16
# Sequences, queries of each and heads: those of a decoding step first.
CASES = ((1, 1, 4), (1, 2, 4), (2, 1, 4), (4, 4, 4), (1, 16, 16))


def listings() -> dict[str, Callable[..., Any]]:
    """The listing as printed and as mended, of arrays `[batch, seqlen, heads, head_dim]`."""
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"
    import jax
    from jax import lax
    from jax import numpy as jnp
    from jax.sharding import Mesh
    from jax.sharding import PartitionSpec as Spec

    jax.config.update("jax_enable_x64", True)
    mesh, keys = Mesh(jax.devices(), ("ranks",)), Spec(None, "ranks")

    def local(q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
        lse = jax.nn.logsumexp(scores, axis=-1)
        return jnp.einsum("bhqk,bkhd->bqhd", jnp.exp(scores - lse[..., None]), v), lse

    def listing(of_rows: Callable[[Any], Any]) -> Callable[..., Any]:
        def decode(q: Any, k: Any, v: Any) -> Any:
            o, lse = local(q, k, v)
            weight = of_rows(jnp.exp(lse - lax.pmax(lse, "ranks")))
            return lax.psum(o * weight, "ranks") / lax.psum(weight, "ranks")

        whole = Spec()
        sharded = jax.shard_map(decode, mesh=mesh, in_specs=(whole, keys, keys), out_specs=whole)
        return jax.jit(sharded)

    return {
        "printed": listing(lambda weight: weight),
        "mended": listing(lambda weight: jnp.swapaxes(weight, 1, 2)[..., None]),
    }


def error_of(
    listing: Callable[..., Any], inputs: list[torch.Tensor], o: torch.Tensor
) -> str | float:
    """The largest error of the listing's result, or why it has none that compares."""
    try:
        result = torch.tensor(listing(*(x.numpy() for x in inputs)).tolist(), dtype=o.dtype)
    except (TypeError, ValueError) as error:
        return f"refused: {str(error).splitlines()[0].partition('.')[0]}"
    if result.shape != o.shape:
        return f"shape {list(result.shape)} in place of {list(o.shape)}"
    return (result - o).abs().max().item()


def row_of(batch: int, seqlen_q: int, heads: int, found: dict[str, Callable[..., Any]]) -> dict:
    q = torch.randn(batch, seqlen_q, heads, HEAD_DIM, dtype=torch.float64)
    k, v = torch.randn(2, batch, KEYS, heads, HEAD_DIM, dtype=torch.float64)
    keys, values = (x.transpose(1, 2).chunk(DEVICES, 2) for x in (k, v))
    shards = [Shard(x, y) for x, y in zip(keys, values, strict=True)]
    o = tree_attention(q.transpose(1, 2), shards, softmax_scale=1.0)[0].transpose(1, 2)
    errors = {name: error_of(listing, [q, k, v], o) for name, listing in found.items()}
    return {
        "name": f"{batch} x {seqlen_q} queries, {heads} heads",
        **errors,
        "wrong": not (isinstance(errors["mended"], float) and errors["mended"] < 1e-12),
    }


def _of(name: str) -> Callable[[dict], str]:
    return lambda row: row[name] if isinstance(row[name], str) else f"{row[name]:.1e}"


COLUMNS: Columns = {
    "case": lambda row: row["name"],
    "as printed": _of("printed"),
    "mended": _of("mended"),
    "right": verdict,
}


def run() -> Report:
    torch.manual_seed(0)
    found = listings()
    rows = [row_of(*case, found) for case in CASES]
    return Report(
        "jax_listing",
        "Appendix D's listing in JAX: the largest error of its result against ours in PyTorch",
        [
            f"{KEYS} keys of {HEAD_DIM} columns over {DEVICES} virtual CPU devices, float64.",
            "Of one query of one sequence the axes of lse and of o happen to agree.",
        ],
        environment() | {"jax": version("jax")},
        rows,
        columns_of(rows, COLUMNS),
    )


def main(arguments: list[str]) -> int:
    parser = parser_of(__doc__, "jax_listing")
    parsed = parser.parse_args(arguments)
    try:
        version("jax")
    except PackageNotFoundError:
        parser.error("JAX is not installed; run: pip install jax")
    return finish(run(), parsed.out)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
