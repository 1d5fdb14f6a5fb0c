# SPDX-License-Identifier: BSD-3-Clause
"""docs/engines.md: its step is right on two ranks, and the lines that it shows are ones that are
printed; docs/engine_reference.md: its views of caches are what they say."""

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import tree_attention
from test_readme import python_program, run
from tree_attention.reference.conformance import DECODE_CASES, MERGE_CASES

ROOT = Path(__file__).parents[2]
PAGE, REFERENCE = ROOT / "docs/engines.md", ROOT / "docs/engine_reference.md"
SIZES = {"pages": 5, "heads": 3, "page_size": 4, "head_dim": 8}
ROWS = re.findall(
    r"^\| ([^|]*`\[.*?\]`.*?) \| (.*?) \| (.*?) \|$", REFERENCE.read_text(), re.MULTILINE
)


@pytest.mark.deep
def test_step_of_the_page_conforms_on_two_ranks():
    checks = "import test_engines_page\n\ntest_engines_page.check_one_call(globals())"
    *lines, last = run(f"{python_program(PAGE)}\n\n{checks}\n", 2).splitlines()
    assert [line.split(":")[0] for line in lines] == [
        f"{'ok':<12}{case.name}" for case in (*MERGE_CASES, *DECODE_CASES)
    ]
    (shown,) = re.findall(r'print\(f"All .*  # (\d+)$', PAGE.read_text(), re.MULTILINE)
    assert last == f"All {shown} cases passed."


def check_one_call(page: dict[str, Any]) -> None:
    """Compare the last block's result with that of all keys, on every rank."""
    o, lse = tree_attention.lean_decode(page["q"], page["k"], page["v"])
    assert 0 < len(page["mine"]) < page["k"].shape[2]
    torch.testing.assert_close(page["o"], o)
    torch.testing.assert_close(page["lse"], lse)


def test_lines_of_the_page_are_printed():
    shown = re.search(r"```\n(ok .*?)```", PAGE.read_text(), re.DOTALL)[1]
    passed, failed, *meaning = shown.splitlines()
    cases = {case.name: case.meaning for case in DECODE_CASES}
    assert re.fullmatch(r"ok {10}(.*): o .*, lse .*", passed)[1] in cases
    assert (
        " ".join(line.strip() for line in meaning)
        == cases[re.fullmatch(r"FAILED {6}(.*): o .*, lse .*", failed)[1]]
    )


def cache_of(axes: list[str], k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The keys and values `[pages, heads, page_size, head_dim]` as a cache with these axes."""
    names = [name for name in axes if name != "2"]
    if names[-1] == "2 * head_dim":
        names[-1], k = "head_dim", torch.cat([k, v], -1)
    order = [list(SIZES).index(name) for name in names]
    if "2" in axes:
        return torch.stack([k.permute(order), v.permute(order)], axes.index("2"))
    return k.permute(order).contiguous()


@pytest.mark.parametrize("cache, keys, values", ROWS[:4], ids=[row[0] for row in ROWS[:4]])
def test_views_of_a_cache_with_both(cache, keys, values):
    assert len(ROWS) == 6
    axes = re.search(r"`\[(.*)\]`", cache)[1].split(", ")
    k, v = torch.randn(2, *SIZES.values()).unbind()
    names = {"cache": cache_of(axes, k, v), "head_dim": SIZES["head_dim"]}
    assert torch.equal(eval(keys.strip("`"), names), k)
    assert torch.equal(eval(values.strip("`"), names), v)


def test_views_of_a_pool_of_tokens():
    (cache, keys, _) = ROWS[4]
    assert "`[slots, heads, head_dim]`" in cache
    k = torch.randn(*SIZES.values())
    pool = k.transpose(1, 2).flatten(0, 1)
    view = eval(re.match("`(.*?)`", keys)[1], {"k": pool, "page_size": SIZES["page_size"]})
    assert torch.equal(view, k) and view.data_ptr() == pool.data_ptr()


def test_views_of_a_latent_cache():
    cache, keys, values = ROWS[5]
    assert "`[pages, page_size, 576]`" in cache
    names = {"cache": torch.randn(5, 4, 576)}
    k, v = (eval(text.strip("`"), names) for text in (keys, values))
    assert k.shape == (5, 1, 4, 576) and v.shape == (5, 1, 4, 512)
    assert torch.equal(k[..., :512], v) and k.data_ptr() == v.data_ptr()


def test_packed_keys():
    (block,) = re.findall(r"```python\n(.*?)```", REFERENCE.read_text(), re.DOTALL)
    page: dict[str, Any] = {}
    exec(block, page)
    bounds = page["cu_seqlens_k"].tolist()
    assert len(bounds) == 3
    for sequence, (begin, end) in enumerate(pairwise(bounds)):
        own = (page[name][sequence : sequence + 1] for name in "qkv")
        q, k, v = next(own), *(x[:, :, begin:end] for x in own)
        o, lse = tree_attention.lean_decode(q, k, v)
        tolerance = torch.finfo(o.dtype).eps * o.abs().max().item()
        torch.testing.assert_close(page["o"][sequence], o[0], rtol=0.0, atol=tolerance)
        torch.testing.assert_close(page["lse"][sequence], lse[0])


def test_table_of_who_passes_what():
    """It has a row for each function that the program checks, and as many failures as it says."""
    program = (ROOT / "benchmarks" / "referee.py").read_text()
    peers = re.findall(r'^    Peer\("(.*?)", "(.*?)"', program, re.MULTILINE)
    text = (ROOT / "benchmarks/results/referee.md").read_text()
    rows = re.findall(r"^\| (.*?) \| (.*?) \| (\d+) of (\d+) \| (.*?) \|$", text, re.MULTILINE)
    assert len(peers) == len(rows) > 10
    names = {case.name for case in (*MERGE_CASES, *DECODE_CASES)}
    for (function, package), row in zip(peers, rows, strict=True):
        assert f", {row[0]}".split(", ")[-1].startswith(f"{package} ") and row[1] == function
        failed = row[4].split("; ")
        assert set(failed) <= names and len(failed) == int(row[3]) - int(row[2])
