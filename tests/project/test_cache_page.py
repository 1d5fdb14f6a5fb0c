# SPDX-License-Identifier: BSD-3-Clause
"""docs/cache.md: its Python blocks are one program, which prints what it shows in one process and
on two ranks; its block of torchao, which need not be installed, runs after the block before it.
docs/cache_layers.md: its tables of bytes are what layers hold."""

import re
from pathlib import Path

import pytest

from test_figures import misfits
from test_readme import ROOT, TWO_RANKS, python_lines, run
from tree_attention.hf.cache.window import MARGIN, STEP
from tree_attention.planning.models import Attention

PAGE = (ROOT / "docs/cache.md").read_text()
(TORCHAO,) = re.findall(r"```python\n(from torchao.*?)```", PAGE, re.DOTALL)


@pytest.mark.deep
@pytest.mark.parametrize("launcher", [(), TWO_RANKS], ids=["alone", "two ranks"])
def test_program_of_the_page_prints_what_it_shows(
    launcher: tuple[str, ...], tmp_path: Path
) -> None:
    script = tmp_path / "cache.py"
    program = python_lines(PAGE.replace(TORCHAO, ""))
    script.write_text(program)
    printed = run(script, *launcher, OMP_NUM_THREADS="1", TMPDIR=str(tmp_path))
    assert printed.splitlines() == re.findall(r"^ +print\(.*\)  # (.+)$", program, re.MULTILINE)
    assert (tmp_path / "passkey-cache" / "index.json").exists()


@pytest.mark.deep
def test_block_of_torchao_runs_after_the_first(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    before = python_lines(PAGE.partition(TORCHAO)[0])
    script = tmp_path / "quantised.py"
    script.write_text(f"{before}\n{TORCHAO}")
    run(script)


def rows_of(section: str) -> list[str]:
    """The rows of the table in a section of docs/cache_layers.md."""
    text = (ROOT / "docs/cache_layers.md").read_text().split(f"\n## {section}\n")[1]
    return re.findall(r"^\|.*", text.split("\n## ")[0], re.MULTILINE)[2:]


def test_bytes_of_a_token() -> None:
    """Half of what a layer with one head of keys and one of values keeps."""
    heads = [Attention(1, 1, 1, columns, columns) for columns in (64, 128)]
    plain = [x.token_bytes("bf16") / 2 for x in heads]
    rows = rows_of("Bytes of a token")
    for dtype, row in zip(("bf16", "int8", "fp8"), rows, strict=True):
        found = [x.token_bytes(dtype) / 2 for x in heads]
        times = [a / b for a, b in zip(found, plain, strict=True)]
        assert not misfits("|".join(row.split("|")[-6:]), found + times)


def test_bytes_of_layers_with_a_window() -> None:
    """tests/hf/test_window_layer.py counts those of 8,192 tokens."""
    rows = rows_of("Layers with a sliding window")
    for row, (tokens, ranks) in zip(
        rows, [(n, ranks) for n in (8192, 131072) for ranks in (1, 2)], strict=True
    ):
        slot = Attention(1, 1, 1, 256, 256).token_bytes("bf16") / 1e6
        every = 26 * tokens / ranks * slot
        kept = (4 * tokens / ranks + 22 * ((512 + MARGIN) / ranks + STEP)) * slot
        assert row.startswith(f"| {tokens:,} |")
        assert not misfits(row, [ranks, every, kept, 100 * kept / every])


def test_bytes_of_latents() -> None:
    latent = Attention(1, 128, 1, 192, 128, latent=(512, 64))
    wide = Attention(1, 128, 128, 192, 128)
    found = latent.token_bytes("bf16"), latent.token_bytes("int8"), wide.token_bytes("bf16")
    for row, value in zip(rows_of("Latents"), found, strict=True):
        assert not misfits(row, [value])
