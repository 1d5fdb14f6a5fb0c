# SPDX-License-Identifier: BSD-3-Clause
"""The Python blocks of the documentation run, in order, as one program per page, and are right.

The program finds what torchrun gives the only rank of a world of one. Each block of README.md is
a program by itself, without torchrun and on two ranks, which prints what stands in it.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ranks_of_commands import started
from tree_attention.reference import attention

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
WORLD_OF_ONE = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
# Of these pages another test runs the program.
IN_OTHER_TESTS = {
    *("big_models.md", "cache.md", "documents.md", "gpu.md", "huggingface.md"),
    "two_servers.md",
}
PAGES = [ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [page for page in PAGES if page.name not in IN_OTHER_TESTS]


def python_program(page: Path) -> str:
    """The page with every line outside a Python block emptied, so that line numbers stay."""
    return python_lines(page.read_text())


def python_lines(text: str) -> str:
    lines, inside = [], False
    for line in text.splitlines():
        if line.startswith("```"):
            inside = line == "```python"
            line = ""
        lines.append(line if inside else "")
    return "\n".join(lines)


def run(program: str, world_size: int = 0, **variables: str) -> str:
    """What all ranks print; a world of 0 is one process without torchrun."""
    with started([], world_size, program=program, variables=variables) as ranks:
        ended = [ranks.wait_for_end(rank) for rank in range(world_size or 1)]
    assert not any(rank.status for rank in ended), [rank.stderr for rank in ended]
    return "".join(rank.stdout for rank in ended)


@pytest.mark.deep
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_run(page):
    program = python_program(page)
    if not program.strip():
        pytest.skip("no Python block")
    run(program, **WORLD_OF_ONE)


def block_of_readme(text: str) -> str:
    (block,) = (x for x in BLOCKS if text in x)
    return block


def check_printed(block: str, printed: str) -> None:
    """What the `print` of the block shows, from one rank alone."""
    (shown,) = re.findall(r"^ +print\(.*\)  # (.+)$", block, re.MULTILINE)
    assert printed.strip() == shown


@pytest.mark.deep
@pytest.mark.parametrize("block", BLOCKS)
def test_block_of_readme_is_a_program_without_torchrun(block: str) -> None:
    check_printed(block, run(block))


@pytest.mark.deep
@pytest.mark.parametrize("check", ["generated_text", "engine"])
def test_block_of_readme_is_right_on_two_ranks(check: str) -> None:
    block = block_of_readme({"generated_text": "hf.from_", "engine": "tree_decode("}[check])
    checks = f"import test_readme\n\ntest_readme.check_{check}(globals())\n"
    checked = f"{block}\n\n{checks}dist.destroy_process_group()\n"
    check_printed(block, run(checked, 2))


def check_generated_text(page: dict[str, Any]) -> None:
    """Check what the block has defined, on every rank. `page`: its globals."""
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(page["path"], attn_implementation="sdpa")
    tokens = plain.generate(**page["inputs"], max_new_tokens=6)[0]
    assert page["text"] == page["tokenizer"].decode(tokens, skip_special_tokens=True)


def check_engine(page: dict[str, Any]) -> None:
    o, lse = page["o"], page["lse"]
    expected_o, expected_lse = attention(page["q"], page["k"], page["v"])
    torch.testing.assert_close(o, expected_o.float())
    torch.testing.assert_close(lse, expected_lse.float())
    both = [torch.empty_like(o) for _ in range(dist.get_world_size())]
    dist.all_gather(both, o)
    assert torch.equal(*both)
