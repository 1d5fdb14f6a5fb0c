# SPDX-License-Identifier: BSD-3-Clause
"""nvcc's PTX on the emulated device: operands and packing in the strings of ptx.h, and what the
compiler moves, which the same kernels compiled by g++ cannot show."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

import emulator_build
from distributed import AMPLE_SECONDS
from ptx_translator import UnknownPTX, translate
from translated import build, instantiation, ptx_of, run

KNOWN_ANSWERS = Path("tests/cuda_emulator/ptx_on_device.cu")


@pytest.fixture(scope="module")
def known_answers(tmp_path_factory: pytest.TempPathFactory) -> str:
    return ptx_of(KNOWN_ANSWERS, tmp_path_factory.mktemp("ptx"), architecture="90a")


def test_known_answers(known_answers: str, tmp_path: Path) -> None:
    program = build(known_answers, "known_answers", tmp_path)
    assert run(program, "known_answers", seconds=AMPLE_SECONDS) == ""


# The same text everywhere: of ptx_hopper.h, or of what nvcc makes of its functions.
MISTAKES = {
    "another parity": (r"(try_wait\.parity\S* %\w+, \[%\w+\]), %\w+;", r"\1, 0;"),
    "no bytes expected": (r"(arrive)\.expect_tx(\S* _, \[%\w+\]), %\w+;", r"\1\2;"),
    "a barrier that copies do not see": (r"fence\.mbarrier_init\S*;", ""),
    "no fence of the proxy": (r"fence\.proxy\.async\S*;", ""),
    "coordinates in another order": (r"(\[%rd\d+, \{%r\d+), (%r\d+), (%r\d+)", r"\1, \3, \2"),
    "registers touched": (r"wgmma\.fence\S*;", ""),
    "b a": (r"(wgmma\.mma\S* \{[^}]*\}), (%rd\d+), (%rd\d+)", r"\1, \3, \2"),
    "not transposed": (r"(wgmma\.mma\S* .*, 1, 1, 1), 1, 0;", r"\1, 0, 0;"),
    "accumulators in another order": (r"(f16 \{%f\d+), (%f\d+), (%f\d+)", r"\1, \3, \2"),
    "a weak wait": (r"(wgmma\.wait_group\S*) 0;", r"\1 1;"),
}
ENTRY = re.compile(r"^\.(?:visible|weak) \.entry (\w+).*?^\}\n", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_of_sm_90a_are_found(known_answers: str, mistake: str, tmp_path: Path) -> None:
    """Of those kernels alone; g++'s are in the place of the others."""
    some = re.compile("memory_barrier_kernel|10box_kernel|wgmma_kernel.*Li16E")
    ptx = ENTRY.sub(lambda found: found[0] if some.search(found[1]) else "", known_answers)
    assert len(ENTRY.findall(ptx)) == 4
    wrong, count = re.subn(*MISTAKES[mistake], ptx)
    assert count > 0
    assert run(build(wrong, "mistake", tmp_path), "known_answers") != ""


@dataclass(frozen=True)
class Kernel:
    """One of the decode kernels, and cases in which it runs."""

    dtypes: str
    rows: int  # of a tile
    cases: str
    columns: int = 64


KERNELS = [
    Kernel("bf16", 8, "decode_short"),
    Kernel("bf16", 16, "decode_short"),
    Kernel("bf16", 128, "decode_row_blocks"),
    Kernel("bf16", 8, "decode_clusters_short"),
    Kernel("bf16", 8, "decode_128_short", 128),
    Kernel("bf16_int8", 8, "decode_int8_short"),
    Kernel("bf16_int8", 16, "decode_int8_short"),
    Kernel("bf16_int8", 8, "decode_columns_short", 256),
    Kernel("bf16_float8", 8, "decode_float8_short"),
    Kernel("bf16", 64, "decode_latents_short", 576),
    Kernel("fp16", 16, "decode_float16_latents_short", 576),
]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: f"{k.dtypes}-{k.columns}-{k.rows}")
def test_decode(kernel: Kernel, tmp_path: Path) -> None:
    """The error bounds, the same bits in every order, and no bank conflicts: as of the source."""
    source = tmp_path / "kernel.cu"
    source.write_text(instantiation(kernel.dtypes, kernel.columns, kernel.rows))
    ptx = ptx_of(source, tmp_path)
    instance = emulator_build.INSTANCES_FOLDER / f"lean_decode_{kernel.dtypes}_{kernel.columns}.cu"
    sources = [*emulator_build.LAUNCHES, instance]
    # That it is the PTX that runs.
    trap = re.sub(r"^\{.*?^\}", "{\n\ttrap;\n\tret;\n}", ptx, flags=re.DOTALL | re.MULTILINE)
    assert "trap.ptx" in run(
        build(trap, "trap", tmp_path, sources), kernel.cases, seconds=AMPLE_SECONDS
    )
    program = build(ptx, "translated", tmp_path, sources)
    assert run(program, kernel.cases, seconds=AMPLE_SECONDS) == ""


def module(*instructions: str) -> str:
    body = "\n".join(f"\t{instruction}" for instruction in instructions)
    declared = "\t.reg .b32 %r<4>;\n\t.reg .f32 %f<4>;\n\t.reg .b16 %rs<4>;\n"
    declared += "\t.reg .pred %p<4>;\n"
    return f".visible .entry kernel(\n\t.param .u64 p\n)\n{{\n{declared}{body}\n\tret;\n}}\n"


def test_translates() -> None:
    code = translate(module("@!%p1 add.s32 %r1, %r2, -3;"), "a")
    assert '#line 9 "a"\nif (!p1) r1 = s32(r2) + s32(-3);\n' in code


WGMMA = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16"
BOX = "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"


@pytest.mark.parametrize(
    ("instruction", "reason"),
    [
        ("lg2.approx.f32 %f1, %f2;", "the instruction"),
        ("add.f64 %r1, %r2, %r3;", "the instruction"),
        ("ld.volatile.global.u32 %r1, [%r2];", "the instruction"),
        ("atom.relaxed.gpu.global.inc.u32 %r1, [%r2], %r3;", "the instruction"),
        ("setp.neu.f32 %r1, %f2, %f3;", "the comparison"),
        ("add.s32 %r1, %r2;", "1 operands"),
        ("add.s32 %r1, %r2, %rs1;", "%rs1 of type b16 as s32"),
        ("add.s32 %r1, %r2, %x1;", "%x1 of type none as s32"),
        ("add.s32 %r1, %r2, 0f3F800000;", "0f3F800000 as s32"),
        ("add.s32 %rs1, %r2, %r3;", "%rs1 of type b16 for a result of s32"),
        ("ld.global.u32 %r1, [%r2+%r3];", "the address [%r2+%r3]"),
        ("ld.global.f16 %rs1, [%r2];", "the type f16"),
        ("bar.sync 1;", "the operand 1, which is not 0"),
        ("barrier.cta.sync.aligned 1;", "1 operands"),
        ("wgmma.mma_async.sync.aligned.m64n8k8.f32.tf32.tf32 {%f1}, 0, 0, 1, 1, 1;", "the instr"),
        (f"{WGMMA} {{%f1, %f2}}, 0, 0, 1, 1, 1, 0, 0;", "2 accumulators"),
        (f"{WGMMA} {{%f0, %f1, %f2, %r3}}, 0, 0, 1, 1, 1, 0, 0;", "4 accumulators"),
        (f"{WGMMA} {{%f0, %f1, %f2, %f3}}, 0, 0, 1, 1, 1, 0, 1;", "the operands 1, 1, 1, 0, 1"),
        (f"{WGMMA} {{%f0, %f1, %f2, %f3}}, 0, 0, 1, -1, 1, 0, 0;", "the operands 1, -1, 1, 0, 0"),
        (f"{WGMMA} {{%f0, %f1, %f2, %f3}}, 0, 0, %p1, 1, 1, 0, 0;", "the operands %p1, 1, 1, 0, 0"),
        (f"{BOX} [%r1], [%r2, {{%r1, %r2}}], [%r3];", "%r2 of type b32 as b64"),
        (f"{BOX} [%r1], [p, {{%r1, %r2}}], [%r3];", "2 coordinates"),
        (".local .align 4 .b8 depot[16];", "the line"),
        (".reg .f64 %fd<3>;", "the type f64"),
    ],
)
def test_unknown_instructions_are_errors(instruction: str, reason: str) -> None:
    with pytest.raises(UnknownPTX, match=re.escape(f"a.ptx:10: {instruction}: {reason}")):
        translate(module("// the next line", instruction), "a.ptx")
