# SPDX-License-Identifier: BSD-3-Clause
"""What CONTRIBUTING.md lets a newcomer type exists: lines to change, symbols, files."""

import re
import subprocess
from pathlib import Path

from tree_attention import _loader

ROOT = Path(__file__).parents[2]


def section(title: str) -> str:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_lines_to_change_are_in_the_files_named_before_them() -> None:
    text = " ".join(section("Try a change of a kernel").split())
    changes = re.findall(r"In `(csrc/\S+)` replace `([^`]+)` by `([^`]+)`", text)
    assert len(changes) == 2
    for path, before, after in changes:
        source = (ROOT / path).read_text()
        assert source.count(before) == 1 and after not in source, (path, before)
    for path in re.findall(r"(?:tests|benchmarks)/[\w/]+\.py", text):
        assert (ROOT / path).exists(), path
    row = re.search(r"the row `([^`]+)`", text)[1]
    assert f"| {row} |" in (ROOT / "benchmarks/results/decode.md").read_text()


def test_symbols_of_gdb_and_perf_are_in_the_extension() -> None:
    """Those of x86: the extension of this machine may be for another processor."""
    gdb = re.findall(r"break ([\w:]+)", section("Try a change of a kernel"))
    hot = re.search(r"On x86 the hot ones are (.*?)\.", section("Profile"), re.DOTALL)[1]
    perf = re.findall(r"`(\w+)`", hot)
    assert len(gdb) == 1 and "sum_pairs" in perf
    extension = _loader._find(_loader.PACKAGE)
    symbols = subprocess.run(["nm", "-C", extension], capture_output=True, text=True, check=True)
    names = gdb + perf * ("avx512" in symbols.stdout)
    assert not [x for x in names if not re.search(rf"(^|\W){x}\b", symbols.stdout, re.MULTILINE)]
