# SPDX-License-Identifier: BSD-3-Clause
"""The predicted times of the CUDA kernel, and their table in the documentation."""

import json
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.cuda import predict
from benchmarks.cuda.cases import (
    HEADS,
    LATENCY,
    MLA,
    MLA_16,
    PAGES,
    QUERIES,
    CudaCase,
    K,
    M,
)
from benchmarks.cuda.predict import BEFORE, H200, NOW, RAN, WGMMA, Tile, instructions

LONG = CudaCase(lengths=(M,))
PAGED = CudaCase(PAGES, lengths=(16 * K,) * 8, page_size=16)


def test_the_page_has_the_table() -> None:
    page = predict.PAGE.read_text()
    assert predict.filled(page, predict.RESULTS) == page, (
        "python -m benchmarks.cuda.predict --write"
    )


def test_the_model_places_the_run_on_an_h100() -> None:
    """What DRAM and latency bound, by the code that ran there."""
    far = {"bf16 32/8 d128 B=1 64k q=16": 1.5, "bf16 16/1 d576/512 B=1 64k": 2.25}
    cases = [case for case in predict.shapes() if case.name in predict.H100_RUN]
    assert len(cases) == len(predict.H100_RUN) == 13
    for case in cases:
        times = predict.H100_RUN[case.name] / predict.predict(case, RAN, predict.H100).us
        assert times == pytest.approx(far.get(case.name, 1.0), rel=0.15), case.name
    long = predict._us(predict.predict(CudaCase(lengths=(32 * K,) * 8)).us)
    page = predict.PAGE.read_text()
    assert f"| 8 x 32k keys, 32/8 heads | {long} |" in page
    ways = [predict.steps_us(n, H200) for n in (NOW.prologue, NOW.end)]
    merge = predict.fixup_us(9, NOW, H200, 4 * 128 * 4) - H200.publish_us
    assert (
        f"to the first request {ways[0]:.2f}, from the last product to the fence {ways[1]:.2f}, "
        f"the counter {H200.publish_us}, the merge {merge:.1f}."
    ) in page.replace("\n", " ")


def test_what_latents_of_8_bits_would_take() -> None:
    """The page's arithmetic: a tile's registers of four elements of K and V, what widening takes of
    each, the scales of two steps, and the matrix loads and copies that halve."""
    totals = []
    for rows, k, v, saved in ((16, 36, 32, 17 + 9), (64, 72, 64, 34 + 4)):
        for name, of_k, of_v in (("int8", 5, 5), ("fp8", 2, 3)):
            scales = NOW.steps[16].widening[name] - 16 * (of_k + of_v) + 8
            widening = k * of_k + v * of_v
            totals.append(NOW.latents[rows][0] + widening + 2 * scales - saved)
    a, b, c, d = (f"{total:,}" for total in totals)
    page = predict.PAGE.read_text()
    assert f"| in all: int8, float8 | {a}, {b} | {c}, {d} |" in page
    a, b, c, d = (f"{H200.clocks_per_instruction * total:,.0f}" for total in totals)
    assert f"at four each | {a}, {b} | {c}, {d} |" in page


def test_instructions_of_a_tile_are_those_of_the_machine_code() -> None:
    tile, few = Tile.of(LONG, 16), Tile.of(LONG)
    assert (tile.rows, tile.warps, tile.keys, tile.num_bytes) == (16, 4, 64, 32 * K)
    assert few == replace(tile, rows=8)
    assert instructions(LONG, tile, BEFORE) == 468 and instructions(PAGED, tile, BEFORE) == 646
    assert instructions(LONG, tile, RAN) == 333 and instructions(PAGED, tile, RAN) == 384
    assert instructions(LONG, few, RAN) == 300 and instructions(PAGED, few, RAN) == 351
    assert instructions(LONG, tile, NOW) == 340 and instructions(PAGED, tile, NOW) == 391
    assert instructions(LONG, few, NOW) == 308 and instructions(PAGED, few, NOW) == 359


def test_latents_are_those_of_the_machine_code() -> None:
    """test_cuda_sass.py counts them. Four column groups exchange 40 KB for 16 rows; with
    64 rows K and V are read by four row groups, and the queries twice."""
    for case, rows, moved in ((MLA_16, 16, 4 * 36 + 4 - 4), (MLA, 64, 36 + 4 * 68 + 144 + 32)):
        for page_size, number in ((0, NOW.latents[rows][0]), (64, NOW.latents[rows][1])):
            paged = replace(case, page_size=page_size)
            tile = Tile.of(paged)
            assert instructions(paged, tile, NOW) == number
            assert predict.shared_bytes(paged, tile) == moved * K
    assert predict.predict(replace(MLA_16, lengths=(512 * K,))).bound == "DRAM"
    assert predict.predict(MLA).bound == "shared memory"
    with pytest.raises(ValueError, match="no such kernel"):
        predict.predict(replace(MLA, kv_dtype="int8"))


def test_clocks_of_a_tile_by_wgmma() -> None:
    """K, V and the queries are read from shared memory once, the weights for each 64 columns."""
    rows_64 = CudaCase(QUERIES, lengths=(64 * K,), seqlen_q=16)
    kilobytes = {rows_64: (32, 16 + 16 + 16 + 2 * 8, 8), MLA_16: (72, 72 + 64 + 18 + 8 * 2, 2)}
    for case, (copied, read, stored) in kilobytes.items():
        tile = Tile.by_wgmma(case)
        clocks = predict.clocks_of(case, tile, WGMMA, H200, 1)
        assert clocks["shared memory"] == (copied + read + stored) * K / 128
        products = clocks["tensor cores"]
        assert products == 64 * (256 if case is rows_64 else 576 + 512) * tile.rows / 2048
        serial = max(products, read * K / 128) + 4 * instructions(case, tile, WGMMA)
        assert clocks["instruction latency"] == serial
    latents, few = Tile.by_wgmma(MLA), Tile.by_wgmma(replace(rows_64, seqlen_q=8))
    assert (latents.rows, latents.blocks, few.rows, few.blocks) == (32, 1, 32, 2)


def test_what_bounds_it() -> None:
    """Short contexts by latency, long ones by the memory, many rows by a warp's instructions."""
    assert predict.predict(LATENCY).bound == "launch and fix-up"
    long = predict.predict(LONG)
    assert long.bound == "DRAM" and 0.9 < long.share < H200.read_efficiency
    rows = [
        predict.predict(CudaCase(QUERIES, heads=(64, 8), lengths=(64 * K,), seqlen_q=n), BEFORE)
        for n in (1, 4, 16)
    ]
    assert rows[0].bound == "DRAM" and rows[2].bound == "instruction latency"
    assert rows[1].share > 1.5 * rows[2].share
    for part, field in [("shared memory", "shared_bytes"), ("issue slots", "issue_slots"),
                        ("tensor cores", "products")]:  # fmt: skip
        slow = replace(H200, **{field: getattr(H200, field) / 32})
        assert predict.predict(LONG, machine=slow).bound == part


@pytest.mark.parametrize("case", [LATENCY, LONG, PAGED], ids=lambda case: case.name)
def test_better_code_is_not_slower(case: CudaCase) -> None:
    better = [
        replace(BEFORE, addresses=137, page_addresses=150),
        replace(BEFORE, prologue=300),
        replace(BEFORE, lse_trips=0),
    ]
    before = predict.predict(case, BEFORE).us
    times = [predict.predict(case, code).us for code in better]
    assert max(times) <= before and min(times) < before


def test_parts_in_turn_and_in_levels() -> None:
    """Nine and 34 parts by eight take two and five trips after that of their lse. 264 parts of many
    rows are merged in three levels, the fewest parts last."""
    assert predict.merges_of(264, 16) == [16, 16, 2] and predict.merges_of(256, 16) == [16, 16]
    assert predict.merges_of(264, 36) == [16, 17] and predict.merges_of(36, 36) == [36]
    code = replace(BEFORE, merge=0, merge_level=0, merge_turn=0)
    machine = replace(H200, l2_us=1.0, publish_us=0.0)
    times = [predict.fixup_us(parts, code, machine) for parts in (8, 9, 34, 36, 264)]
    assert times == [2, 3, 6, 6, (1 + 2) + (1 + 3)]


@pytest.mark.parametrize("rows", [4, 8, 16])
def test_where_one_level_of_merges_ends(rows: int) -> None:
    """The outputs of eight kv heads take one level; those of four or fewer would wait for one
    multiprocessor, which has to take in all parts."""
    part_bytes = rows * 128 * 4

    def us(parts: int, max_merged: int) -> float:
        return predict.fixup_us(parts, NOW, H200, part_bytes, max_merged)

    assert us(34, 264) < us(34, 16) or rows == 16
    assert us(66, 264) > us(66, 36) and us(264, 264) > 2.5 * us(264, 36)


def test_bytes_that_are_read_again_count() -> None:
    def us(seqlen_q: int, code: predict.Code = NOW) -> float:
        case = CudaCase(QUERIES, heads=(64, 8), lengths=(M,), seqlen_q=seqlen_q)
        return predict.predict(case, code, slow).us

    slow = replace(H200, read_bandwidth=H200.read_bandwidth / 4)  # else instructions bound
    assert us(32, replace(NOW, in_step=False)) > 1.9 * us(16)
    assert us(32) < 1.1 * us(16)
    assert us(15 * 16) == us(15 * 16, replace(NOW, in_step=False))  # 120 of 132 workers are too few


@pytest.mark.parametrize("case", [CudaCase(dtype="fp32"), CudaCase(HEADS, head_dim=256)])
def test_kernels_that_the_model_does_not_know(case: CudaCase) -> None:
    with pytest.raises(ValueError, match="the model has no such kernel"):
        predict.predict(case)


@pytest.mark.parametrize("rows", [1, 8, 9, 16, 17, 32, 33, 64, 65, 128, 200])
@pytest.mark.parametrize("kv_dtype", ["", "int8"])
def test_tiles_are_those_of_the_kernels(kv_dtype: str, rows: int) -> None:
    import emulated

    for head_dim in (64, 96, 128) if not kv_dtype else (64, 128):
        tile = Tile.of(CudaCase(kv_dtype=kv_dtype, heads=(rows, 1), head_dim=head_dim))
        plan = emulated.plan(
            torch.bfloat16, head_dim, rows, emulated.H100, torch.int8 if kv_dtype else None
        )
        found = plan.row_tile, plan.num_threads, plan.blocks_per_sm
        assert (tile.rows, 32 * tile.warps, tile.blocks) == found


@pytest.mark.parametrize("rows", [1, 16, 17, 64, 128])
def test_tiles_of_latents_are_those_of_the_kernels(rows: int) -> None:
    import emulated

    tile = Tile.of(replace(MLA, heads=(rows, 1)))
    plan = emulated.plan(torch.bfloat16, 576, rows, emulated.H100)
    found = plan.row_tile, plan.num_threads, plan.blocks_per_sm
    assert (tile.rows, 32 * tile.warps, tile.blocks) == found


def test_measured_rows_fill_the_table(tmp_path: Path) -> None:
    def row(case: CudaCase, us: float, **more: object) -> dict[str, object]:
        shares = {"ceiling_share": 0.5, "read_share": 0.625}
        times = {"lean_decode": {"median_us": us}}
        return {"name": case.name, "wrong": False, "times": times, **shares, **more}

    def write(name: str, *rows: object) -> None:
        (tmp_path / name).write_text(json.dumps({"rows": rows}))

    write(
        "decode_cuda_quick.json", row(LATENCY, 7.25), row(LONG, 1200.0), row(PAGED, 1, wrong=True)
    )
    write("decode_cuda.json", row(LONG, 1100.0), {"name": "failed", "wrong": True, "times": {}})
    write("decode.json", row(LATENCY, 1.0))
    rows = predict.measured(tmp_path)
    assert {name: row["times"]["lean_decode"]["median_us"] for name, row in rows.items()} == {
        LATENCY.name: 7.25,
        LONG.name: 1100.0,  # of the longer run
    }
    lines = predict.table(rows).splitlines()
    of = {line.split(" | ")[0].removeprefix("| "): line for line in lines[2:]}
    assert of[LATENCY.name].endswith("| 7.2 | 50 % | 62 % |")
    assert of[LONG.name].endswith("| 1,100 | 50 % | 62 % |")
    assert of[PAGED.name].endswith("|  |  |  |")
    assert all(line.count(" | ") == lines[0].count(" | ") for line in lines)


def test_reports_of_a_call_fill_the_page(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """From the archive that scripts/gpu_check.sh leaves to benchmarks/results and the page."""
    rows = [
        ["case", "ours us", "% read", "cuDNN us", "34 workers", "264 workers", "error", "right"],
        ["1k", "7.25", "30", "6.50", "8.00", "7.00", "1e-3", "yes"],
        ["64k", "70.1", "90", "69.0", "-", "-", "1e-3", "yes"],
    ]
    lines = [f"| {' | '.join(row)} |" for row in [rows[0], ["---:"] * 8, *rows[1:]]]
    report = "\n".join(["# Title", "", "```", "commit: not a checkout", "```", *lines, ""])
    call, results = tmp_path / "call", tmp_path / "results"
    call.mkdir()
    results.mkdir()
    (call / "decode_cuda_quick.md").write_text(report)
    environment = {"environment": {"commit": "not a checkout"}, "rows": []}
    (call / "decode_cuda_quick.json").write_text(json.dumps(environment))
    (call / "tune_cuda.md").write_text(report)
    (call / "tune_cuda.json").write_text("{}")
    (call / "stamps_cuda.json").write_text("{}")  # of a program that was ended
    with tarfile.open(tmp_path / "results.tar.gz", "w:gz") as archive:
        for path in call.iterdir():
            archive.add(path, path.name)
    page = tmp_path / "page.md"
    begins = [
        predict.BEGIN,
        predict.BEGIN_RUN,
        predict.BEGIN_WGMMA,
        *map(predict.begin_of, predict.SHOWN),
    ]
    page.write_text("".join(f"{begin}old\n{predict.END}" for begin in begins))
    monkeypatch.setattr(predict, "PAGE", page)
    monkeypatch.setattr(predict, "ROOT", tmp_path)
    monkeypatch.setattr(predict, "commit", lambda: "0123456789")
    options = ["--results", str(results), "--write"]
    predict.main(["--take", str(tmp_path / "results.tar.gz"), *options])
    assert "has no stamps_cuda.md: it was not measured, or not to" in capsys.readouterr().out
    assert {path.name for path in results.iterdir()} == {
        "decode_cuda_quick.md", "decode_cuda_quick.json", "tune_cuda.md",
    }  # fmt: skip
    for name in ("decode_cuda_quick.md", "decode_cuda_quick.json", "tune_cuda.md"):
        text = (results / name).read_text()
        assert "not a checkout" not in text and "0123456789" in text
    found = dict(zip(begins, page.read_text().split(predict.END), strict=False))
    assert found[predict.begin_of("peers")].splitlines()[1:] == [
        "| case | ours us | % read | cuDNN us | right |",
        "| --- | ---: | ---: | ---: | ---: |",
        "| 1k | 7.25 | 30 | 6.50 | yes |",
        "| 64k | 70.1 | 90 | 69.0 | yes |",
    ]
    assert found[predict.begin_of("workers")].splitlines()[1:] == [
        "| case | ours us | 34 workers | 264 workers |",
        "| --- | ---: | ---: | ---: |",
        "| 1k | 7.25 | 8.00 | 7.00 |",
    ]
    assert found[predict.begin_of("stretches")].endswith("Not measured yet.\n")


def test_the_headings_are_those_of_the_reports() -> None:
    """And no other table of a report is wanted."""
    from benchmarks.cuda import lost_device, profile, stamps, tables, tune

    assert {predict.SHOWN[x][1][0] for x in ("peers", "workers")} == {"case"}
    assert {*predict.PEERS, *predict.WORKERS} <= {*tables.HEADINGS.values()}
    names = {"decode_cuda_quick", "decode_cuda", stamps.NAME, profile.NAME, lost_device.NAME}
    assert predict.REPORTS.keys() == names | {tune.NAME}


def test_program(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
                 tmp_path: Path) -> None:  # fmt: skip
    page = tmp_path / "page.md"
    begins = predict.BEGIN, predict.BEGIN_RUN, predict.BEGIN_WGMMA

    def shown(*texts: str) -> str:
        tables = (f"{x}{text}{predict.END}" for x, text in zip(begins, texts, strict=True))
        return f"before\n{'between'.join(tables)}after\n"

    page.write_text(shown("old\n", "old\n", "old\n"))
    monkeypatch.setattr(predict, "SHOWN", {})
    predict.main(["--results", str(tmp_path)])
    printed = capsys.readouterr().out
    assert printed == predict.table({})
    monkeypatch.setattr(predict, "PAGE", page)
    monkeypatch.setattr(predict, "ROOT", tmp_path)
    predict.main(["--results", str(tmp_path), "--write"])
    tables_of_the_page = printed, predict.table_of_the_run(), predict.table_of_wgmma()
    assert page.read_text() == shown(*tables_of_the_page)
