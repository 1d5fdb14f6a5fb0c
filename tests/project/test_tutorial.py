# SPDX-License-Identifier: BSD-3-Clause
"""docs/two_servers.md: its program runs on two ranks with a tiny model in the place of the large
one, and docs/README.md has every page."""

import re
import shutil
from pathlib import Path

import pytest

from test_readme import ROOT, python_program, run

PAGE = ROOT / "docs/two_servers.md"
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


@pytest.mark.deep
def test_program_runs_with_a_tiny_model(tmp_path: Path) -> None:
    checkpoint, document = tmp_path / "model", tmp_path / "document.txt"
    shutil.copytree(ROOT / "examples/passkey-llama", checkpoint)
    (checkpoint / "chat_template.jinja").write_text(TEMPLATE)
    document.write_text("The pass key of the garden is 48213. Remember it. The sky is blue.")
    program = python_program(PAGE)
    for old, new in (("Llama-3.1-8B-Instruct", checkpoint), ("document.txt", document)):
        assert program.count(f'"{old}"') + program.count(f"'{old}'") == 1
        program = program.replace(old, str(new))
    # The tiny model has as many key heads as there are ranks.
    printed = run(program, 2).splitlines()
    assert re.fullmatch(r"reading \d+ tokens", printed[0])
    assert re.fullmatch(r"\d+ s", printed[-1]) and len(printed) > 2


def test_index_has_every_page() -> None:
    index = (ROOT / "docs/README.md").read_text()
    linked = set(re.findall(r"\]\((\w+\.md)", index))
    assert linked | {"README.md"} == {page.name for page in (ROOT / "docs").glob("*.md")}
    assert "](docs/README.md)" in (ROOT / "README.md").read_text()
