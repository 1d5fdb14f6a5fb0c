# SPDX-License-Identifier: BSD-3-Clause
"""What the compiler made of the kernels, where a wrong choice would cost time or correctness."""

import re
import subprocess
import warnings

import pytest

import emulator_build
from benchmarks.cuda.predict import NOW, WGMMA
from compilation import ROOT
from sass import Code, cubins, disassemble, find_tool, parse, text_of
from sass_paths import blocks_of, shortest_cycle
from translated import NVCC_FLAGS

INSTANCES = [path.stem for path in emulator_build.INSTANCES]
SOURCES = (
    *("lean_decode_bf16_64", "lean_decode_bf16_128", "lean_decode_bf16_256"),
    *("lean_decode_bf16_576", "lean_decode_fp16_576"),
    *("lean_decode_fp32_64", "lean_decode_fp32_256"),
)
# These also copy scales, of four bytes, and their code is larger.
SOURCES_OF_8_BITS = tuple(
    f"lean_decode_{queries}_{cached}_{columns}"
    for queries, cached, columns in (
        *(("bf16", "int8", 128), ("bf16", "float8", 128)),
        *(("fp16", "float8", 128), ("bf16", "int8", 256)),
    )
)
# More than the largest of them has, which is that of float32 and 256 columns.
MAX_CODE_BYTES = 108 * 1024

# By the element of queries; of float32 there are none.
PRODUCTS = {"BFloat16": {"HMMA.16816.F32.BF16"}, "Float16": {"HMMA.16816.F32"}, None: set()}

# More instructions than these are a warning and no failure: a right result is worth more. By
# head_dim and rows: per tile of contiguous keys, and of pages.
TILE_BUDGETS = {
    **{"Li64ELi8E": (335, 397), "Li128ELi8E": (317, 381), "Li256ELi8E": (331, 385)},
    **{"Li64ELi16E": (394, 458), "Li128ELi16E": (349, 413), "Li256ELi16E": (364, 416)},
}

# Of latents: rows, a thread's copies and a warp's products of a tile, whose instructions are in
# benchmarks/cuda/predict.py.
LATENTS = {"Li576ELi16E": (16, 18, 68), "Li576ELi64E": (64, 9, 136)}

# The keys of a step and the instructions of one, from its scores to the next one's: with 8 rows,
# and with more.
STEP_BUDGETS = {
    "lean_decode_bf16_int8_128": ((32, 606), (16, 400)),
    "lean_decode_bf16_float8_128": ((32, 442), (16, 318)),
    "lean_decode_fp16_float8_128": ((32, 442), (32, 550)),
    "lean_decode_bf16_int8_256": ((32, 622), (16, 420)),
}


@pytest.fixture(scope="module", params=SOURCES)
def kernels(request: pytest.FixtureRequest) -> list[Code]:
    found = disassemble(request.param, "sm_90")
    assert found
    return found


def warn_beyond(budget: float, found: int, what: str) -> None:
    if found > budget:
        warnings.warn(f"{what}: {found} instructions, {budget:.0f} expected", stacklevel=2)


def test_no_local_memory(kernels):
    """Neither spills nor arrays that are indexed at run time."""
    assert [k.name for k in kernels if k.count(r"LDL|STL") > 0] == []


def unsafe_copies(kernel: Code) -> list[str]:
    """Copies to shared memory whose descriptor may not be the driver's constant: ptxas has lost
    those that a kernel makes, and a device refuses the copies as illegal instructions. The constant
    is loaded on the way to every other block, into two uniform registers that nothing else writes.
    Copies that need none (sm_80) have no descriptor to lose."""
    branch = kernel.positions("BRA|BRX|CALL|EXIT")[0]
    safe = set()
    writes = [
        (i, int(match[1]))
        for i, operands in enumerate(kernel.operands)
        if kernel.instructions[i][:3] != "BRA" and (match := re.match(r" UR(\d+)\b", operands))
    ]
    for i, register in writes:
        if re.fullmatch(r" UR\d*[02468], c\[0x0\]\[0x\w+\]\s*", kernel.operands[i]) is None:
            continue
        is_alone = [n for _, n in writes if n in (register, register + 1)] == [register]
        if kernel.instructions[i] == "ULDC.64" and i < branch and is_alone:
            safe.add(f"desc[UR{register}]")
    copies = [kernel.operands[i] for i in kernel.positions("LDGSTS")]
    return [text for text in copies if set(re.findall(r"desc\[.*?\]|\+UR\d+", text)) - safe]


COPY = "LDGSTS.E.BYPASS.LTC128B.128"
CONSTANT, BRANCH = "ULDC.64 UR8, c[0x0][0x208]", "@P0 BRA `(.L_x_1)"


@pytest.mark.parametrize(
    "instructions, is_safe",
    {
        "constant": ((CONSTANT, BRANCH, f"{COPY} [R177], desc[UR8][R24.64], P1"), True),
        "none": ((BRANCH, f"{COPY} [R177], [R24.64], P1"), True),
        "lost": ((CONSTANT, BRANCH, f"{COPY} [R179+UR0], desc[UR1][R20.64], !P0"), False),
        "undefined": ((CONSTANT, BRANCH, f"{COPY} [R177], desc[UR10][R24.64], P1"), False),
        "of one path": ((BRANCH, CONSTANT, f"{COPY} [R177], desc[UR8][R24.64]"), False),
        "written again": (
            (CONSTANT, BRANCH, "R2UR UR9, R5", f"{COPY} [R177], desc[UR8][R24.64]"), False,
        ),
    }.values(),
    ids=lambda value: value if isinstance(value, bool) else "",
)  # fmt: skip
def test_unsafe_copies_are_found(instructions, is_safe):
    lines = [f"/*{16 * i:04x}*/ {text} ;" for i, text in enumerate(instructions)]
    (kernel,) = parse("\n".join(["\t.section\t.text._Z18lean_decode_kernelIf,", *lines]))
    assert (unsafe_copies(kernel) == []) == is_safe


def test_every_source_is_there():
    for architecture, found in cubins().items():
        decode = {name for name in found if name.startswith("lean_decode")}
        assert decode == set(INSTANCES), architecture


@pytest.mark.parametrize("source", INSTANCES)
def test_copies_are_legal(source):
    """Of every decode kernel, for every target that the extension has."""
    for architecture in cubins():
        for kernel in disassemble(source, architecture):
            assert unsafe_copies(kernel) == [], (architecture, kernel.name)
            assert kernel.count("LDGSTS") > 0, (architecture, kernel.name)


@pytest.mark.deep
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
@pytest.mark.parametrize("source", ["ablations.cu", "stamped.cu", "tiles.cu"])
def test_copies_of_the_ablations_are_legal(source, architecture, tmp_path):
    """These kernels have the product's copies in loops of their own."""
    cubin = tmp_path / "kernels.cubin"
    command = [find_tool("nvcc"), *NVCC_FLAGS, "-cubin", f"-arch={architecture}", "-Icsrc"]
    path = f"benchmarks/cuda/ablations/{source}"
    subprocess.run([*command, path, "-o", cubin], cwd=ROOT, check=True, capture_output=True)
    kernels = parse(text_of(cubin.read_bytes()), "(?:kernel|decode)I")
    found = [kernel for kernel in kernels if kernel.count("LDGSTS") > 0]
    assert found and [kernel.name for kernel in found if unsafe_copies(kernel)] == []


# By head_dim: rows, the products of a tile with its keys and with its values, and the copies of
# each of the four runs of slots that a tile may have: a loop over boxes of K, and one over those of
# V.
WGMMA_TILES = {576: ((16, 32), 36 + 32, 1), 128: ((32, 64), 8 + 8, 2), 64: ((32, 64), 4 + 4, 2)}


@pytest.mark.deep
@pytest.mark.parametrize("source", emulator_build.WGMMA_INSTANCES, ids=lambda path: path.stem)
def test_wgmma(source, tmp_path):
    """ptxas neither spills, though two blocks of most kernels share a multiprocessor's registers,
    nor lets products wait for one another."""
    cubin = tmp_path / "kernels.cubin"
    command = [find_tool("nvcc"), *NVCC_FLAGS, "-cubin", "-arch=sm_90a", "-Xptxas=-v", "-Icsrc"]
    result = subprocess.run(
        [*command, source, "-o", cubin], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert "Potential Performance Loss" not in result.stderr
    kernels = parse(text_of(cubin.read_bytes()), "lean_decode_wgmma_kernelI")
    head_dim = int(source.stem.rpartition("_")[2])
    tiles, products, copies = WGMMA_TILES[head_dim]
    assert len(kernels) == len(tiles)
    element = ".BF16" if "bf16" in source.stem else ""
    for rows in tiles:
        [kernel] = [kernel for kernel in kernels if f"Li{head_dim}ELi{rows}E" in kernel.name]
        assert kernel.count(r"LDL|STL") == 0, rows
        assert kernel.count("HGMMA") == products, rows
        assert kernel.count(rf"HGMMA\.64x{rows}x16\.F32{element}$") == products, rows
        assert kernel.count("UTMALDG.4D") == 4 * copies, rows
        needed = {"HGMMA": products, "MUFU.EX2": rows // 2}
        found = shortest_cycle(blocks_of(kernel.lines), "HGMMA", needed)
        warn_beyond(1.03 * WGMMA.wgmma[head_dim, rows], found, kernel.name)


@pytest.fixture(scope="module")
def others() -> dict[tuple[str, str], str]:
    """What nvdisasm makes of the other kernels, by target and name of the first of a source."""
    return {
        (architecture, name): text_of(cubin)
        for architecture, found in cubins().items()
        for name, cubin in found.items()
        if name not in INSTANCES
    }


def test_no_other_kernel_has_such_copies(others):
    assert len(others) >= len(cubins())
    for name, text in others.items():
        assert "LDGSTS" not in text, name


def test_ranges_are_split_without_local_memory(others):
    """The tensors that are repeated are chosen at run time: from the parameters, not a copy."""
    texts = [text for (_, name), text in others.items() if "split_ranges_kernel" in name]
    assert len(texts) == len(cubins())
    for text in texts:
        assert "STG" in text and re.search(r"\b(LDL|STL|LD|ST|CALL\.ABS)\b", text) is None


@pytest.mark.parametrize("source", SOURCES_OF_8_BITS)
def test_8_bits(source):
    """No local memory at all, float8 by the device's conversion, and the instructions of a step."""
    for kernel in disassemble(source, "sm_90"):
        assert kernel.count(r"LDL|STL") == 0, kernel.name
        assert (kernel.count(r"F2FP\.F16\.E4M3") > 0) == ("Float8" in kernel.name), kernel.name
        has_8_rows = "ELi8E" in kernel.name
        keys, budget = STEP_BUDGETS[source][0 if has_8_rows else 1]
        if has_8_rows:
            needed = {"HMMA": keys, "MUFU.EX2": keys // 4, "LDS R": keys // 4}
        else:
            needed = {"HMMA": 2 * keys, "MUFU.EX2": keys // 2, "LDS.64": keys // 4}
        found = shortest_cycle(blocks_of(kernel.lines), "HMMA", needed)
        warn_beyond(budget, found, kernel.name)


def test_no_indirect_branches(kernels):
    assert [k.name for k in kernels if k.count(r"BRX|JMX|CALL\.ABS")] == []


def forms_clusters(kernel: Code) -> bool:
    return re.search("ELi(8|16)E", kernel.name) is not None


def test_parts_are_published_once(kernels):
    """Every block stores its parts, fences, counts itself, and drops stale lines of its cache. A
    barrier of a cluster has a fence before it, and drops them after it."""
    for kernel in kernels:
        order = [
            instruction
            for instruction in kernel.instructions
            if re.match(r"MEMBAR|ATOM|CCTL|RED\b|UCGABAR", instruction)
        ]
        barrier = ["MEMBAR.ALL.GPU", "UCGABAR_ARV", "UCGABAR_WAIT", "CCTL.IVALL"]
        parts = ["MEMBAR.ALL.GPU", "ATOMG.E.INC.STRONG.GPU", "CCTL.IVALL"]
        assert order == (2 * barrier if forms_clusters(kernel) else []) + parts, kernel.name


def test_loads_see_the_stores_of_other_blocks(kernels):
    """A load through the path of constants might return what a line held before."""
    for kernel in kernels:
        assert kernel.count(r"LDG") > 0
        assert kernel.count(r"LDG\S*\.CONSTANT|LDG\S*\.NA|TLD|TEX") == 0, kernel.name


def test_parameters_are_read_as_constants(kernels):
    """A function that is not inlined would read them by generic loads, through the caches. Such
    loads are those of eight blocks' states, their stages and their o alone."""
    for kernel in kernels:
        expected = 3 * 8 if forms_clusters(kernel) else 0
        assert kernel.count(r"(LD|ST|ATOM)(\.|$)") == kernel.count(r"LD(\.|$)") == expected


def test_partial_states_are_stored_by_16_bytes(kernels):
    """Both where a block leaves its own and where it leaves a merged one."""
    for kernel in kernels:
        assert kernel.count(r"STG\.\S*128$") >= 2, kernel.name


def test_outputs_are_stored_by_8_and_16_bytes(kernels):
    """Four elements at once, where blocks store an output of theirs alone, a merged one and an
    empty one; the elements one by one are for an output without alignment."""
    for kernel in kernels:
        assert kernel.count(r"STG\.\S*64$") >= 3, kernel.name
        assert kernel.count(r"STG\.\S*128$") >= 2 + 3, kernel.name


def test_eight_parts_are_requested_before_one_is_used(kernels):
    for kernel in kernels:
        loads = kernel.positions(r"LDG\.\S*128$")
        assert loads and len(loads) % 8 == 0, kernel.name
        for first in range(0, len(loads), 8):
            parts: set[int] = set()
            for i in range(loads[first], loads[first + 7]):
                assert not parts & kernel.reads(i), (kernel.name, i, kernel.operands[i])
                if i in loads:
                    part = kernel.writes(i)
                    parts |= {part, part + 1, part + 2, part + 3}


def test_copies_are_of_16_bytes_past_the_first_cache(kernels):
    for kernel in kernels:
        copies = kernel.count(r"LDGSTS")
        assert copies > 0 and copies == kernel.count(r"LDGSTS\.E\.BYPASS\.\S*128$"), kernel.name


def test_products_are_in_the_matrix_unit(kernels):
    for kernel in kernels:
        products = {kernel.instructions[i] for i in kernel.positions("HMMA")}
        element = re.search("BFloat16|Float16", kernel.name)
        assert products == PRODUCTS[element and element[0]], kernel.name


def test_code_size(kernels):
    assert {k.name: k.num_bytes for k in kernels if k.num_bytes > MAX_CODE_BYTES} == {}


def test_instructions_per_tile(kernels):
    """Of a warp with 8 or 16 rows that requests a whole tile and attends to one, with and without
    pages, whose places come by two shuffles for each copy."""
    for kernel in kernels:
        budget = next((b for part, b in TILE_BUDGETS.items() if part in kernel.name), None)
        if budget is None or kernel.name.startswith("f"):
            continue
        blocks = blocks_of(kernel.lines)
        has_8_rows = "ELi8E" in kernel.name
        products, weights, maxima = (16, 4, 6) if has_8_rows else (32, 8, 4)
        needed = {"HMMA": products, "LDGSTS": 16, "LDGDEPBAR": 2, "MUFU.EX2": weights}
        with_pages = needed | {"LDG.E": 1, "SHFL": maxima + 32}
        for needs, expected in zip((needed, with_pages), budget, strict=True):
            warn_beyond(expected, shortest_cycle(blocks, "HMMA", needs), kernel.name)


def test_instructions_per_tile_of_latents(kernels):
    """Of a warp with 16 rows, in one step of 32 keys with four column groups, in two with two."""
    for kernel in kernels:
        for part, (rows, copies, products) in LATENTS.items():
            if part not in kernel.name:
                continue
            blocks = blocks_of(kernel.lines)
            needed = {"HMMA": products, "LDGSTS": copies, "LDGDEPBAR": 2, "MUFU.EX2": 16}
            maxima = 4 * products // 68  # of rows, by shuffles
            with_pages = needed | {"LDG.E": 1, "SHFL": maxima + copies}
            for needs, predicted in zip((needed, with_pages), NOW.latents[rows], strict=True):
                found = shortest_cycle(blocks, "HMMA", needs)
                warn_beyond(1.03 * predicted, found, kernel.name)
