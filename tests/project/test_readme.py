# SPDX-License-Identifier: BSD-3-Clause
"""The Python blocks of the documentation run, in order, as one program per page, and are right.

The program finds what torchrun gives the only rank of a world of one; README.md, whose blocks are
for several ranks, also runs on two.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tree_attention.reference import attention

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
TWO_RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
WORLD_OF_ONE = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
OF_TWO_RANKS = "big_models.md"  # which test_big_models_page.py runs
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [page for page in PAGES if page.name != OF_TWO_RANKS]


def python_program(page: Path) -> str:
    """The page with every line outside a Python block emptied, so that line numbers stay."""
    lines, inside = [], False
    for line in page.read_text().splitlines():
        if line.startswith("```"):
            inside = line == "```python"
            line = ""
        lines.append(line if inside else "")
    return "\n".join(lines)


def run(script: Path, *launcher: str, **environment: str) -> str:
    path = os.pathsep.join(str(ROOT / folder) for folder in ("python", "tests/project"))
    result = subprocess.run(
        [sys.executable, *launcher, str(script)],
        cwd=ROOT,
        env=os.environ | environment | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.deep
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_run(page, tmp_path):
    program = python_program(page)
    if not program.strip():
        pytest.skip("no Python block")
    script = tmp_path / page.name
    script.write_text(program)
    run(script, **WORLD_OF_ONE)


@pytest.mark.deep
def test_readme_is_right_on_two_ranks(tmp_path):
    script = tmp_path / "readme.py"
    checks = (
        "import test_readme\n\ntest_readme.check_readme(globals())\ndist.destroy_process_group()"
    )
    script.write_text(f"{python_program(README)}\n\n{checks}\n")
    # The number that the page says, once: one rank prints.
    shown = re.search(r"# (\d+)$", README.read_text(), re.MULTILINE)
    assert shown and run(script, *TWO_RANKS, OMP_NUM_THREADS="1").strip() == shown[1]


def check_readme(page: dict[str, Any]) -> None:
    """Check what the blocks of README.md have defined, on every rank. `page`: its globals."""
    assert dist.get_world_size() == 2
    check_generated_text(page)
    for interleave in (1, 16):
        check_engine(page["decode_attention"], interleave)


def check_generated_text(page: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(page["path"], attn_implementation="sdpa")
    tokens = plain.generate(**page["inputs"], max_new_tokens=6)[0]
    assert page["text"] == page["tokenizer"].decode(tokens, skip_special_tokens=True)


def check_engine(decode_attention: Any, interleave: int) -> None:
    """The engine's step over pages that hold NaN wherever no token is."""
    torch.manual_seed(interleave)
    heads_q, heads_kv, head_dim, page_size = 8, 2, 64, 16
    seq_lens = torch.tensor([300, 1])  # the second leaves a rank without keys
    rank, world_size = dist.get_rank(), dist.get_world_size()
    q = torch.randn(len(seq_lens), heads_q, head_dim)
    k, v = torch.randn(2, len(seq_lens), int(seq_lens.max()), heads_kv, head_dim).unbind()

    pages_each = 1 + int(seq_lens.max()) // page_size
    block_table = torch.randperm(2 * len(seq_lens) * pages_each)[: len(seq_lens) * pages_each]
    block_table = block_table.reshape(len(seq_lens), pages_each).int()
    caches = [torch.full((2 * block_table.numel(), page_size, heads_kv, head_dim), torch.nan)]
    caches.append(caches[0].clone())
    for sequence, length in enumerate(seq_lens.tolist()):
        # As vLLM defines it: the owner of a slot, and where it is among the slots of its owner.
        mine = [i for i in range(length) if i // interleave % world_size == rank]
        local = [i // (interleave * world_size) * interleave + i % interleave for i in mine]
        for i, slot in zip(mine, local, strict=True):
            place = block_table[sequence, slot // page_size], slot % page_size
            for cache, x in zip(caches, (k, v), strict=True):
                cache[place] = x[sequence, i]

    caches = [cache.transpose(1, 2) for cache in caches]
    o, lse = decode_attention(q.unsqueeze(2), *caches, block_table, seq_lens, interleave)
    o, lse = o.squeeze(2), lse.squeeze(2)
    for sequence, length in enumerate(seq_lens.tolist()):
        keys, values = (x[sequence, :length].transpose(0, 1)[None] for x in (k, v))
        expected_o, expected_lse = attention(q[sequence, None, :, None], keys, values)
        torch.testing.assert_close(o[sequence], expected_o[0, :, 0].float())
        torch.testing.assert_close(lse[sequence], expected_lse[0, :, 0].float())
    both = [torch.empty_like(o) for _ in range(world_size)]
    dist.all_gather(both, o)
    assert torch.equal(*both)
