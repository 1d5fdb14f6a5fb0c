# SPDX-License-Identifier: BSD-3-Clause
"""Latent attention (MLA) in absorbed form, beside keys and values expanded from the latents.

    python -m benchmarks.latent operator --out DIR

A step of one token in the shapes of DeepSeek-V3 (128 heads) and DeepSeek-V2-Lite (16 heads).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tree_attention import lean_decode
from tree_attention.reference import quantise

from ..cpu.cases import shuffled_pages
from ..cpu.libraries import SGLANG, SglangDecode, add_peers, load
from ..cpu.peers import PEER_ERROR
from ..harness.accuracy import Float64Check
from ..harness.measure import (
    InputArena,
    Load,
    amx_peak,
    load_warnings,
    pin_threads,
    read_memory,
    time_alternating,
)
from ..harness.program import add_quick, finish, parser_of, progress_bar, shown
from ..harness.report import Columns, Report, columns_of, environment, verdict

RANK, ROPE, NOPE, VALUE = 512, 64, 128, 128  # columns of a latent, and of a head
OURS, CONTIGUOUS, ABSORBED, EXPANSION, SDPA, PROBE = (
    "lean_decode",
    "lean_decode, contiguous latents",
    "with both products",
    "expansion, SDPA",
    "SDPA, keys expanded",
    "read probe",
)


@dataclass(frozen=True)
class LatentCase:
    heads: int = 128
    keys: int = 16384
    kv_dtype: str = ""  # of the latents, if they have 8 bits and a scale
    page_size: int = 0  # latents in a page of a shuffled page table, all full; 0: contiguous

    @property
    def name(self) -> str:
        kind = f" latents {self.kv_dtype}" if self.kv_dtype else ""
        pages = f" pages of {self.page_size}" if self.page_size else ""
        return f"bf16 {self.heads}/1 d{RANK + ROPE}/{RANK}{kind} B=1 {self.keys}{pages}"

    @property
    def io_bytes(self) -> int:
        """Latents, with their scales, q and o, once."""
        key_bytes = RANK + ROPE + 4 if self.kv_dtype else 2 * (RANK + ROPE)
        return self.keys * key_bytes + 2 * self.heads * (2 * RANK + ROPE)

    @property
    def operations(self) -> int:
        """Multiply-adds count two: q.k and p.v over the keys."""
        return 2 * self.heads * (2 * RANK + ROPE) * self.keys


STANDARD = (
    LatentCase(),
    LatentCase(kv_dtype="int8"),
    LatentCase(keys=4096),
    LatentCase(heads=64),
    LatentCase(heads=16),
    LatentCase(page_size=128),
    LatentCase(heads=16, page_size=128),
)
QUICK = (
    LatentCase(heads=64, keys=300),
    LatentCase(heads=4, keys=300, kv_dtype="int8"),
    LatentCase(heads=4, keys=320, page_size=32),
)


class Inputs:
    """Queries of a token, latents in the arena, and `kv_b_proj`, which expands latents to heads."""

    def __init__(self, case: LatentCase, arena: InputArena) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            return (scale * torch.randn(*shape, generator=generator)).bfloat16()

        self.scale = (NOPE + ROPE) ** -0.5
        self.q_nope, self.q_rope = (normal(1, case.heads, 1, n, scale=2.0) for n in (NOPE, ROPE))
        # [heads, NOPE + VALUE, RANK], so that expanded columns have the size of the others.
        self.kv_b = normal(case.heads, NOPE + VALUE, RANK, scale=RANK**-0.5)
        latents = normal(1, 1, case.keys, RANK + ROPE)
        self.sets: list[tuple[Tensor, Tensor | None]] = []
        if case.kv_dtype:
            latents, scale = quantise(latents, getattr(torch, case.kv_dtype))
            self.sets.append((latents, scale))
            latents = (latents * scale[..., None]).bfloat16()
        self.num_sets = InputArena.num_sets(latents.nbytes)
        for i in range(self.num_sets):
            if case.kv_dtype:
                self.sets.append((self.sets[0][0].clone(), scale.clone()))
            else:
                view = arena.view(i, latents.shape, latents.dtype)
                self.sets.append((view.copy_(latents), None))
        self.latents = latents
        self.expanded = self.expand(latents)
        self.page_table: Tensor | None = None
        self.slots = torch.arange(case.keys, dtype=torch.int32)[None]  # where each latent is
        if case.page_size:
            self.page_table = shuffled_pages([case.keys], case.page_size, generator)
            order = self.page_table[0].long()
            self.slots = self.slots.view(-1, case.page_size)[order].flatten()[None]
            for i, (x, _) in enumerate(self.sets):
                pages = x.view(-1, 1, case.page_size, RANK + ROPE)
                pages[order] = latents.view_as(pages)
                self.sets[i] = (pages, None)

    def absorb_query(self) -> Tensor:
        q = self.q_nope[0, :, 0, None] @ self.kv_b[:, :NOPE]
        return torch.cat([q.transpose(0, 1)[None].transpose(1, 2), self.q_rope], -1)

    def expand_output(self, o: Tensor) -> Tensor:
        return (o[0] @ self.kv_b[:, NOPE:].mT)[None]

    def expand(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of every head, as transformers' DeepseekV3Attention makes them. Values
        have zeros up to the size of keys, without which SDPA falls back to a much slower form."""
        heads = self.kv_b.shape[0]
        x = F.linear(latents[:, 0, :, :RANK], self.kv_b.flatten(0, 1))
        k, v = x.unflatten(-1, (heads, -1)).transpose(1, 2).split([NOPE, VALUE], -1)
        rope = latents[..., RANK:].expand(-1, heads, -1, -1)
        return torch.cat([k, rope], -1), F.pad(v, (0, NOPE + ROPE - VALUE))

    def attend(self, k: Tensor, v: Tensor) -> Tensor:
        q = torch.cat([self.q_nope, self.q_rope], -1)
        return F.scaled_dot_product_attention(q, k, v, scale=self.scale)[..., :VALUE]


def run_case(
    case: LatentCase, arena: InputArena, seconds: float, peak: float, sglang: bool
) -> dict[str, Any]:
    inputs = Inputs(case, arena)
    q = inputs.absorb_query()

    def decode(q: Tensor, i: int) -> tuple[Tensor, Tensor]:
        latents, scale = inputs.sets[i]
        return lean_decode(
            q, latents, latents[..., :RANK], softmax_scale=inputs.scale, k_scale=scale,
            v_scale=scale, page_table=inputs.page_table,
        )  # fmt: skip

    functions: dict[str, Callable[[int], Any]] = {
        OURS: lambda i: decode(q, i),
        ABSORBED: lambda i: inputs.expand_output(decode(inputs.absorb_query(), i)[0]),
        EXPANSION: lambda i: inputs.attend(*inputs.expand(inputs.latents)),
        SDPA: lambda i: inputs.attend(*inputs.expanded),
        PROBE: lambda i: read_memory(*(x for x in inputs.sets[i] if x is not None)),
    }
    if case.page_size:
        copies = [inputs.latents.clone() for _ in inputs.sets]
        functions[CONTIGUOUS] = lambda i: lean_decode(
            q, copies[i], copies[i][..., :RANK], softmax_scale=inputs.scale
        )
    if sglang and not case.kv_dtype:
        attend = SglangDecode(q[:, :, 0], RANK, inputs.slots, [case.keys], inputs.scale)
        pools = [latents.view(-1, 1, RANK + ROPE) for latents, _ in inputs.sets]
        functions[SGLANG] = lambda i: attend(pools[i], pools[i][..., :RANK])[:, :, None]
    with Load() as load:
        samples = time_alternating(functions, num_sets=inputs.num_sets, seconds=seconds)
    ours = samples[OURS]
    latents, scale = inputs.sets[0]
    options = {"softmax_scale": inputs.scale, "k_scale": scale, "v_scale": scale}
    check = Float64Check(
        q, latents, latents[..., :RANK], None, page_table=inputs.page_table, **options
    )
    accuracy = check.accuracy(*ours.result)
    peer = check.accuracy(samples[SGLANG].result) if SGLANG in samples else None
    peer_right = peer is None or peer.o_error <= PEER_ERROR * peer.o_bound
    outputs = {name: samples[name].result.float() for name in (ABSORBED, EXPANSION, SDPA)}
    size = outputs[SDPA].abs().max()
    # The order of the roundings to bfloat16 differs: another problem would differ by its size.
    differences = {
        name: ((x - outputs[SDPA]).abs().max() / size).item() for name, x in outputs.items()
    }
    bandwidth = case.io_bytes / ours.median
    probe_bandwidth = sum(x.nbytes for x in inputs.sets[0] if x is not None) / samples[PROBE].median
    return {
        "name": case.name,
        "case": asdict(case),
        "io_bytes": case.io_bytes,
        "operations": case.operations,
        "times": {name: sample.to_json() for name, sample in samples.items()},
        "amx_share": case.operations / ours.median / peak if peak else None,
        "bandwidth_share": bandwidth / probe_bandwidth,
        "ratios": {
            name: samples[name].median / samples[ABSORBED].median for name in (EXPANSION, SDPA)
        }
        | {
            name: samples[name].median / ours.median
            for name in (SGLANG, CONTIGUOUS)
            if name in samples
        },
        "other_load": load.others,
        "accuracy": asdict(accuracy),
        "differences": differences,
        "peer_error": peer and peer.o_error,
        "wrong": not (accuracy.right and peer_right and max(differences.values()) < 0.05),
    }


def measure(cases: Sequence[LatentCase], seconds: float, paths: Sequence[Path] = ()) -> Report:
    sglang = SGLANG in load(paths)
    cpus = pin_threads()
    set_bytes = [2 * (RANK + ROPE) * case.keys for case in cases]
    arena = InputArena(max(n * InputArena.num_sets(n) for n in set_bytes))
    with torch.inference_mode(), progress_bar(True) as progress:
        peak = amx_peak()
        rows = [run_case(case, arena, seconds, peak, sglang) for case in shown(progress, cases)]
    return Report(
        name="latent_operator",
        title="Latent attention, absorbed and expanded",
        notes=NOTES,
        environment=environment(
            **{
                "pinned to CPUs": cpus or "not pinned",
                "bfloat16 peak of AMX": f"{peak / 1e9:.0f} GFLOP/s" if peak else "no AMX",
                **({"libraries of peers": ", ".join(x.name for x in paths)} if paths else {}),
            }
        ),
        rows=rows,
        columns=[x for x in columns_of(rows, COLUMNS) if set(x.values) != {"-"}],
        warnings=load_warnings([row["other_load"] for row in rows]),
    )


NOTES = (
    "One new token, medians of alternating runs through Python. lean_decode: attention over the "
    f"latents of {RANK} + {ROPE} columns, whose first {RANK} are the values. With both products: "
    "also q times the keys' half of kv_b_proj before it, and o times the values' half after it.",
    "Expansion, SDPA: kv_b_proj of all latents to every head's keys and values, as transformers' "
    "modules do it, then scaled_dot_product_attention. SDPA, keys expanded: that alone, on keys "
    f"and values of {NOPE + ROPE} columns a head (values with zeros, as SDPA is many times slower "
    "on fewer columns than keys have). The ratios are to ours with both products.",
    "% AMX counts two operations for a multiply-add of q.k and p.v, as a share of what AMX does "
    f"with bfloat16 in registers. Weights are two terms, so that {RANK * 2 + ROPE} of "
    f"{RANK * 3 + ROPE} such operations count: 68 % would be the most. % BW: of a probe that only "
    "reads the latents.",
    "error is that of lean_decode, relative to the row's largest magnitude, against float64; more "
    "than twice that of plain PyTorch plus one rounding is WRONG, and so is an output of another "
    "form that differs by more than 5 % of the largest magnitude.",
    "Contiguous: the same call as ours on the latents of the pages as one tensor. "
    f"{SGLANG}, where a library of --peers has it: decode_attention_cpu on the same latents, "
    "without storing the new token, into an output that exists, beside ours without products. Its "
    f"error may be {PEER_ERROR} times as large as ours before it is WRONG.",
)


def ms(name: str) -> Callable[[dict[str, Any]], str]:
    return lambda row: (
        f"{row['times'][name]['median_us'] / 1e3:.2f}" if name in row["times"] else "-"
    )


COLUMNS: Columns = {
    "case": lambda row: row["name"],
    "ours ms": ms(OURS),
    "with both products ms": ms(ABSORBED),
    "% AMX": lambda row: f"{100 * row['amx_share']:.0f}" if row["amx_share"] else "-",
    "% BW": lambda row: f"{100 * row['bandwidth_share']:.0f}",
    "expansion, SDPA ms": ms(EXPANSION),
    "/ours": lambda row: f"{row['ratios'][EXPANSION]:.1f}",
    "SDPA, keys expanded ms": ms(SDPA),
    "SDPA /ours": lambda row: f"{row['ratios'][SDPA]:.1f}",
    "contiguous ms": ms(CONTIGUOUS),
    "ours /contiguous": lambda row: (
        f"{1 / row['ratios'][CONTIGUOUS]:.2f}" if CONTIGUOUS in row["ratios"] else "-"
    ),
    f"{SGLANG} ms": ms(SGLANG),
    f"{SGLANG} /ours": lambda row: (
        f"{row['ratios'][SGLANG]:.2f}" if SGLANG in row["ratios"] else "-"
    ),
    f"{SGLANG} error": lambda row: (
        f"{row['peer_error']:.1e}" if row["peer_error"] is not None else "-"
    ),
    "error": lambda row: f"{row['accuracy']['o_error']:.1e}",
    "right": verdict,
}


def main(arguments: list[str]) -> int:
    parser = parser_of(__doc__, "latent_operator")
    add_quick(parser, 2.0)
    add_peers(parser)
    parsed = parser.parse_args(arguments)
    cases = QUICK if parsed.quick else STANDARD
    return finish(measure(cases, parsed.seconds, parsed.peers), parsed.out)
