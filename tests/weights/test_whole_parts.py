# SPDX-License-Identifier: BSD-3-Clause
"""The line at load that says which weights are not cut, and how much of a rank's they are.

The mistakes these tests are for: a rank that holds far more than its share and nobody is told, one
that is told of what is cut, or a line on every rank and for every norm.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from distributed import run_ranks
from tiers import tiers

pytest.importorskip("transformers")

from hf_families import HYBRIDS, REFUSED, WORKING, make_model
from hf_refusal import no_longer_refused
from tree_attention import hf

FAMILIES = WORKING | HYBRIDS | no_longer_refused(REFUSED)
PAGE = " ".join((Path(__file__).parents[2] / "docs/troubleshooting.md").read_text().split())
# What is most of that which is not cut; None where this is norms and routers alone.
WHOLE = {
    "Granite 4": "model.layers.*.mamba.in_proj, model.layers.*.mamba.out_proj",
    "Qwen3.5": "model.layers.*.linear_attn.in_proj_qkv, model.layers.*.linear_attn.out_proj, "
    "model.layers.*.linear_attn.in_proj_z",
    "DeepSeek-V3": "model.layers.*.self_attn.kv_a_proj_with_mqa, model.layers.*.self_attn.q_a_proj",
    "Gemma 4": "model.embed_tokens_per_layer, model.layers.*.per_layer_input_gate, "
    "model.layers.*.per_layer_projection and 1 more",
    "GPT-J": None,
    "Llama": None,
    "Qwen3-MoE": None,
}
WAYS = ("parallelize", "from_pretrained", "from_pretrained int8")
Said = dict[str, tuple[list[str], dict[str, tuple[int, tuple[int, ...]]]]]


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _load(rank: int, world_size: int, path: Path, name: str) -> Said:
    """The lines of each way to load, and the bytes and the shape of each parameter."""
    said = {}
    for way in WAYS:
        handler = _Lines()
        logging.getLogger("tree_attention").addHandler(handler)
        if way == "parallelize":
            model = hf.parallelize(make_model(FAMILIES[name]), tensor_parallel_size=2)
        else:
            weights = "int8" if way.endswith("int8") else None
            model = hf.from_pretrained(path, tensor_parallel_size=2, weights=weights)
        logging.getLogger("tree_attention").removeHandler(handler)
        held = {own: (x.nbytes, tuple(x.shape)) for own, x in model.named_parameters()}
        said[way] = handler.lines, held
    return said


@pytest.mark.parametrize(
    "name",
    tiers(["Granite 4", "Llama"], ["GPT-J", "Qwen3.5", "DeepSeek-V3", "Gemma 4", "Qwen3-MoE"]),
)
def test_a_line_on_the_first_rank(name: str, tmp_path: Path) -> None:
    if name not in FAMILIES:
        pytest.skip(f"this release of transformers hides the attention of {name}")
    model = make_model(FAMILIES[name])
    model.save_pretrained(tmp_path)
    first, second = run_ranks(_load, 2, tmp_path, name)
    held = first["parallelize"][1]
    uncut = [own for own, x in model.named_parameters() if held[own][1] == tuple(x.shape)]
    uncut += [f"{own.removesuffix('weight')}scale" for own in uncut]
    for way in WAYS:
        assert second[way][0] == []
        lines, held = first[way]
        share = sum(held[own][0] for own in uncut if own in held)
        total = sum(num_bytes for num_bytes, _ in held.values())
        assert len(lines) == (share > 0.1 * total)
        if WHOLE[name] is None:
            assert lines == []
            continue
        names = WHOLE[name]
        if way.endswith("int8"):  # fewer bytes of latents' projections, and so others beside them
            (names,) = names.split(",")[:1]
        says = (
            f"{way.split()[0]}: {share / total:.0%} of this rank's {total / 1e6:,.1f} MB of "
            f"weights are not cut, and are the same on every rank: {names}"
        )
        assert all(line.startswith(says) for line in lines)
        assert lines == [says] * len(lines) or way.endswith("int8")
        shown = re.sub(r"[\d,.]+(?=%| MB)", "…", says.partition(": ")[2]).replace(names, "…")
        assert f"`from_pretrained: {shown}`" in PAGE
    assert WHOLE[name] is None or first["from_pretrained"][0] != []
