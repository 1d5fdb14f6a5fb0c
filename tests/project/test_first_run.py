# SPDX-License-Identifier: BSD-3-Clause
"""docs/first_run.md: the lines that it explains are ones that the demonstration prints."""

import ast
import re

import pytest

from test_readme import ROOT

PAGE = (ROOT / "docs/first_run.md").read_text()
PROGRAMS = ("examples/passkey-llama/ask.py", "examples/long_context.py")
EXPLAINED = re.findall(r"^\| `([^`]+)` \|", PAGE, re.MULTILINE)


def printed() -> list[str]:
    """The texts of the programs, with an ellipsis for what is put into them."""
    found = []
    for program in PROGRAMS:
        for node in ast.walk(ast.parse((ROOT / program).read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (x.value if isinstance(x, ast.Constant) else "…" for x in node.values)
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def is_printed(line: str, texts: list[str]) -> bool:
    pattern = ".*".join(re.escape(part) for part in line.split("…"))
    return any(re.search(pattern, text, re.DOTALL) for text in texts)


@pytest.mark.parametrize("line", EXPLAINED)
def test_lines_that_are_explained_are_printed(line: str) -> None:
    assert is_printed(line, printed())


def test_headings_are_those_of_the_command() -> None:
    command = (ROOT / "scripts/demo.sh").read_text()
    assert all(program in command for program in PROGRAMS)
    assert re.search(r'^say "Next: a model of yours', command, re.MULTILINE)


def test_a_line_that_is_not_printed_is_found() -> None:
    assert len(EXPLAINED) > 15 and not is_printed("A guest sends … KiB for a token.", printed())
