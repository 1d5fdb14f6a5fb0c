# SPDX-License-Identifier: BSD-3-Clause
"""How often keys come from DRAM by the order of the line, and the table of the documentation."""

from pathlib import Path

import pytest

from benchmarks.cuda import line_order
from benchmarks.cuda.line_order import Shape, by_heads, by_row_blocks, by_sequences, reads_of_dram
from benchmarks.cuda.predict import in_step

ORDERS = by_heads, by_sequences, by_row_blocks


def test_the_page_has_the_table() -> None:
    page = line_order.PAGE.read_text()
    assert line_order.BEGIN + line_order.table() + line_order.END in page, (
        "python -m benchmarks.cuda.line_order --write"
    )


def test_orders_have_the_same_outputs() -> None:
    shape = Shape(2, 3, 4, 64)
    outputs = [list(order(shape)) for order in ORDERS]
    assert len({tuple(sorted(own)) for own in outputs}) == 1 and len(outputs[0]) == 2 * 3 * 4
    assert outputs[0] != outputs[1] != outputs[2] != outputs[0]


@pytest.mark.parametrize("order", ORDERS)
def test_without_a_cache_all_is_read_and_with_a_large_one_once(order) -> None:  # type: ignore[no-untyped-def]
    shape = Shape(1, 2, 3, 640)
    assert reads_of_dram(shape, order, 1, l2_bytes=0) == 3
    assert reads_of_dram(shape, order, 4, l2_bytes=1 << 40) == 1


def test_workers_in_step_read_once() -> None:
    """The other orders do not, whatever the workers."""
    shape = Shape(8, 4, 4, 4096)
    small = 8 * line_order.TILE_BYTES  # two tiles of each group of workers
    assert reads_of_dram(shape, by_row_blocks, 16, small) == 1
    for order in (by_heads, by_sequences):
        assert reads_of_dram(shape, order, 16, small) > 1.9


def test_in_step_rounds_as_the_plan_does() -> None:
    """The numbers of test_decode_row_blocks."""
    row_blocks = (1, 2, 5, 7, 32, 15, 200)
    assert [in_step(132, n) for n in row_blocks] == [132, 132, 130, 126, 128, 132, 132]


def test_program(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
                 tmp_path: Path) -> None:  # fmt: skip
    page = tmp_path / "page.md"
    page.write_text(f"before\n{line_order.BEGIN}old\n{line_order.END}after\n{line_order.END}")
    monkeypatch.setattr(line_order, "SHAPES", ())
    line_order.main([])
    printed = capsys.readouterr().out
    assert printed == line_order.table()
    monkeypatch.setattr(line_order, "PAGE", page)
    monkeypatch.setattr(line_order, "ROOT", tmp_path)
    line_order.main(["--write"])
    written = f"before\n{line_order.BEGIN}{printed}{line_order.END}after\n{line_order.END}"
    assert page.read_text() == written
