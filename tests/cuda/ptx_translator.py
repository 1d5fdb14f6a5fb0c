# SPDX-License-Identifier: BSD-3-Clause
"""Translates the PTX that nvcc makes of kernels to C++ for the emulated device.

A kernel becomes a function of the same (mangled) name, which the linker takes in the place of what
g++ makes of the kernel's source: host code, launches and checks stay as they are. Each instruction
becomes a statement, each register a variable that begins as NaN, and `#line` gives the emulator's
errors the lines of the PTX. Only the instructions that kernels have are known; any other is an
error that names it."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ptx_forms import (
    BITS,
    BOX_COPY,
    CALLS,
    CALLS_WITH_RESULT,
    CPP_TYPES,
    EXPRESSIONS,
    LDMATRIX,
    MMA,
    OPPOSITES,
    ORDERS,
    SHUFFLES,
    SPECIAL_REGISTERS,
    WGMMA,
    WHOLE,
)


class UnknownPTX(ValueError):
    """What the translator does not know; nothing is left out silently."""


_ACCESS = re.compile(
    r"(ld|st)(?:\.(global|shared(?:::cluster)?|param))?(?:\.v([24]))?\.([a-z]\d+)$"
)
_FUNCTION = re.compile(
    r"^(?:\.visible\s+|\.weak\s+)*\.(?P<kind>entry|func)\s*(?:\((?P<result>[^()]*)\))?\s*(?P<name>\w+)"
    r"\s*\((?P<params>[^()]*)\)[^{;]*(?P<end>[{;])",
    re.MULTILINE,
)
_PARAM = re.compile(r"\.param\s+(?:\.align\s+(\d+)\s+)?\.([a-z]\d+)\s+(\w+)(?:\[(\d+)\])?")
_REG = re.compile(r"\.reg\s+\.(\w+)\s+(%?\w+)(?:<(\d+)>)?;$")
_INSTRUCTION = re.compile(r"(?:@(!?)(%\w+)\s+)?([a-z][\w.:]*)\s*(.*);$", re.DOTALL)
_SHARED = re.compile(r"^\.extern \.shared .* (\w+)\[\];$", re.MULTILINE)


def split(operands: str) -> list[str]:
    """At the commas that are in no braces or brackets."""
    parts = re.findall(r"(?:[^,{(\[]|\{[^}]*\}|\([^)]*\)|\[[^\]]*\])+", operands)
    return [part.strip() for part in parts]


def list_of(operand: str) -> list[str]:
    return [part.strip() for part in operand.strip("{}()").split(",")]


@dataclass
class Function:
    """One function of the module, while it is translated."""

    symbols: set[str]  # names of memory, variables of the same name in C++: its address
    registers: dict[str, str] = field(default_factory=dict)  # prefix or whole name: type

    def type_of(self, register: str) -> str:
        """The type that a register was declared with; nothing for what is none."""
        return self.registers.get(register) or self.registers.get(register.rstrip("0123456789"), "")

    def read(self, operand: str, type: str) -> str:
        """The operand as a C++ expression of `type`."""
        cpp = CPP_TYPES[type]
        if operand in SPECIAL_REGISTERS:
            return SPECIAL_REGISTERS[operand]
        if operand in self.symbols:
            return f"{cpp}({operand})"
        if operand.startswith("%"):
            declared, name = self.type_of(operand), operand[1:]
            if not declared or BITS[declared] < BITS[type]:
                raise UnknownPTX(f"{operand} of type {declared or 'none'} as {type}")
            if CPP_TYPES[declared] == cpp:
                return name
            if "f32" in (type, declared):
                return f"bit_cast<{cpp}>({name})"
            return f"{cpp}({name})"
        if type == "f32" and re.fullmatch(r"0f[0-9A-F]{8}", operand):
            return f"bit_cast<float>(0x{operand[2:]}u)"
        if type != "f32" and re.fullmatch(r"-?\d+|0x[0-9A-Fa-f]+", operand):
            if type == "pred":
                return str(int(operand, 0) != 0).lower()
            return f"{cpp}({int(operand, 0)}{'ll' if BITS[type] == 64 else ''})"
        raise UnknownPTX(f"{operand} as {type}")

    def write(self, register: str, type: str, value: str) -> str:
        """The statement that gives a register a value of `type`."""
        if register == "_":
            return f"{value};"
        declared = self.type_of(register)
        if not declared or BITS[declared] < BITS[type]:
            raise UnknownPTX(f"{register} of type {declared or 'none'} for a result of {type}")
        if "f32" in (type, declared) and type != declared:
            value = f"bit_cast<{CPP_TYPES[declared]}>({value})"
        return f"{register[1:]} = {value};"

    def address(self, operand: str, type: str) -> str:
        """Of [register], [symbol] or either + bytes."""
        match = re.fullmatch(r"\[\s*([%\w]+)\s*(?:\+\s*(-?\d+))?\s*\]", operand)
        if match is None:
            raise UnknownPTX(f"the address {operand}")
        return self.read(match[1], type) + (f" + {match[2]}" if match[2] else "")

    def arguments(self, operands: list[str], types: tuple[str, ...]) -> list[str]:
        if len(operands) != len(types):
            raise UnknownPTX(f"{len(operands)} operands")
        values = []
        for operand, type in zip(operands, types, strict=True):
            if type.startswith("["):
                values.append(self.address(operand, type.strip("[]")))
            elif type in CPP_TYPES:
                values.append(self.read(operand, type))
            elif operand == type:
                values.append(operand)
            else:
                raise UnknownPTX(f"the operand {operand}, which is not {type}")
        return values

    # Statements.

    def instruction(self, opcode: str, operands: list[str]) -> str:
        form, _, type = opcode.rpartition(".")
        if opcode in ("bra", "bra.uni"):
            return f"goto {operands[0].lstrip('$')};"
        if opcode in CALLS:
            types, call = CALLS[opcode]
            return call.format(*self.arguments(operands, types)) + ";"
        if opcode in CALLS_WITH_RESULT:
            result, types, call = CALLS_WITH_RESULT[opcode]
            call = call.format(*self.arguments(operands[1:], types))
            return self.write(operands[0], result, call)
        if opcode in WHOLE:
            of, to, expression = WHOLE[opcode]
            values = dict(zip("abc", self.arguments(operands[1:], tuple(of.split())), strict=False))
            return self.write(operands[0], to, expression.format(T=CPP_TYPES[to], **values))
        if opcode in ("mov.b32", "mov.b64") and "{" in "".join(operands):
            return self.pair(type, *operands)
        if form in EXPRESSIONS and type in EXPRESSIONS[form][0].split():
            return self.write(operands[0], type, self.expression(form, type, operands[1:]))
        for pattern, translate in self.families():
            if (match := re.fullmatch(pattern, opcode)) is not None:
                return translate(match, operands)
        raise UnknownPTX("the instruction")

    def families(self) -> Iterator[tuple[str, Callable[[re.Match[str], list[str]], str]]]:
        yield r"setp\.([a-z]{2})(u?)\.(\w+)", self.compare
        yield _ACCESS.pattern, self.access
        yield r"shfl\.sync\.(up|bfly|idx)\.b32", self.shuffle
        yield "|".join(map(re.escape, LDMATRIX)), self.load_matrices
        yield "|".join(map(re.escape, MMA)), self.multiply
        yield re.escape(BOX_COPY), self.copy_box
        yield WGMMA, self.begin_product
        yield r"call\.uni", self.call

    def expression(self, form: str, type: str, operands: list[str]) -> str:
        text = EXPRESSIONS[form][1]
        names = sorted(set(re.findall(r"\{([a-d])", text)))
        if len(operands) != len(names):
            raise UnknownPTX(f"{len(operands)} operands")
        values = {"T": CPP_TYPES[type]}
        for field_name in re.findall(r"\{([a-d]\w*)\}", text):
            letter, _, other = field_name.partition("_")
            values[field_name] = self.read(operands["abcd".index(letter)], other or type)
        return text.format(**values)

    def pair(self, type: str, to: str, of: str) -> str:
        """mov between a register and two of half its width, the lower bits first."""
        half = f"b{BITS[type] // 2}"
        whole = CPP_TYPES[type]
        if to.startswith("{"):
            low, high = list_of(to)
            value = self.read(of, type)
            writes = self.write(low, half, f"{CPP_TYPES[half]}({value})") + self.write(
                high, half, f"{CPP_TYPES[half]}({value} >> {BITS[half]})"
            )
            return f"{{ {writes} }}"
        low, high = (self.read(operand, half) for operand in list_of(of))
        return self.write(to, type, f"{whole}({high}) << {BITS[half]} | {low}")

    def compare(self, match: re.Match[str], operands: list[str]) -> str:
        order, unordered, type = match.groups()
        if type not in CPP_TYPES or order not in ORDERS or len(operands) != 3:
            raise UnknownPTX("the comparison")
        a, b = (self.read(operand, type) for operand in operands[1:])
        if unordered:  # of floating-point numbers, and true for NaN
            if type != "f32" or order not in OPPOSITES:
                raise UnknownPTX("the comparison")
            return self.write(operands[0], "pred", f"!({a} {OPPOSITES[order]} {b})")
        if type == "f32" and order == "ne":
            raise UnknownPTX("the comparison")
        return self.write(operands[0], "pred", f"{a} {ORDERS[order]} {b}")

    def access(self, match: re.Match[str], operands: list[str]) -> str:
        kind, space, count, type = match.groups()
        if type not in CPP_TYPES:
            raise UnknownPTX(f"the type {type}")
        size = int(count or 1) * BITS[type] // 8
        address, registers = operands if kind == "st" else reversed(operands)
        if space in ("shared", "shared::cluster"):
            bytes = f"shared_bytes_at({self.address(address, 'b32')}, {size})"
        else:
            bytes = f"bytes_at({self.address(address, 'b64')}, {size})"
        names = list_of(registers)
        if kind == "st":
            values = ", ".join(self.read(name, type) for name in names)
            return f"store<{CPP_TYPES[type]}, {len(names)}>({bytes}, {{{values}}});"
        results = "".join(self.write(name, type, f"v[{i}]") for i, name in enumerate(names))
        return f"{{ const auto v = load<{CPP_TYPES[type]}, {len(names)}>({bytes}); {results} }}"

    def shuffle(self, match: re.Match[str], operands: list[str]) -> str:
        result, _, inside = operands[0].partition("|")
        arguments = ", ".join(self.arguments(operands[1:], ("b32",) * 4))
        value = f'shfl<Shuffle::{SHUFFLES[match[1]]}>("{match[0]}", {arguments}, inside)'
        return f"{{ bool inside; {self.write(result, 'b32', value)}" + (
            f" {self.write(inside, 'pred', 'inside')} }}" if inside else " }"
        )

    def load_matrices(self, match: re.Match[str], operands: list[str]) -> str:
        results = list_of(operands[0])
        call = f"{LDMATRIX[match[0]]}(m, {self.address(operands[1], 'b32')});"
        writes = "".join(self.write(name, "b32", f"m[{i}]") for i, name in enumerate(results))
        return f"{{ u32 m[{len(results)}]; {call} {writes} }}"

    def multiply(self, match: re.Match[str], operands: list[str]) -> str:
        d, a, b, c = map(list_of, operands)
        sums = ", ".join(self.read(name, "f32") for name in c)
        rows, columns = (", ".join(self.read(name, "b32") for name in names) for names in (a, b))
        writes = "".join(self.write(name, "f32", f"d[{i}]") for i, name in enumerate(d))
        return (
            f"{{ float d[{len(c)}] = {{{sums}}}; const u32 a[{len(a)}] = {{{rows}}}; "
            f"{MMA[match[0]]}(d, a, {columns}); {writes} }}"
        )

    def copy_box(self, match: re.Match[str], operands: list[str]) -> str:
        destination, source, barrier = operands
        map, coordinates = re.fullmatch(r"\[([^,]*), (\{.*\})\]", source).groups()
        map = f"reinterpret_cast<const CUtensorMap*>({self.address(f'[{map}]', 'b64')})"
        places = [self.read(name, "s32") for name in list_of(coordinates)]
        if len(places) != 4:
            raise UnknownPTX(f"{len(places)} coordinates")
        to, of = self.address(destination, "b32"), self.address(barrier, "b32")
        return f"cp_async_bulk_tensor_4d({', '.join([to, map, *places, of])});"

    def begin_product(self, match: re.Match[str], operands: list[str]) -> str:
        d, a, b, *others = operands
        sums = list_of(d)
        if 2 * len(sums) != int(match[1]) or {self.type_of(name) for name in sums} != {"f32"}:
            raise UnknownPTX(f"{len(sums)} accumulators")
        # That d is added to, factors of a and b, and which of them are transposed.
        if others not in [["1", "1", "1", transposed, "0"] for transposed in "01"]:
            raise UnknownPTX(f"the operands {', '.join(others)}")
        product = ", ".join(
            [
                str(match[2] == "bf16").lower(),
                str(len(sums)),
                str(others[3] == "1").lower(),
                self.read(a, "b64"),
                self.read(b, "b64"),
            ]
        )
        pointers = ", ".join(f"&{name[1:]}" for name in sums)
        return (
            f"{{ float* const d[] = {{{pointers}}}; "
            f"begin_product({{{product}}}, d, source_location::current()); }}"
        )

    def call(self, match: re.Match[str], operands: list[str]) -> str:
        result, name, parameters = operands
        return f"{name}({', '.join([*list_of(result), *list_of(parameters)])});"

    def statement(self, text: str) -> str:
        """One label, declaration, brace of a scope or instruction."""
        if text in "{}":
            return text
        if text.startswith(".pragma"):
            return ""
        if (match := re.fullmatch(r"\$?(\w+):", text)) is not None:
            return f"{match[1]}:;"
        if (match := _REG.fullmatch(text)) is not None:
            return self.declare(match[1], match[2], int(match[3] or 0))
        if (match := _PARAM.match(text)) is not None:
            return self.declare_bytes(*match.groups())
        if (match := _INSTRUCTION.fullmatch(text)) is None:
            raise UnknownPTX("the line")
        negated, predicate, opcode, operands = match.groups()
        statement = self.instruction(opcode, split(operands))
        return (
            f"if ({negated}{self.read(predicate, 'pred')}) {statement}" if predicate else statement
        )

    def declare(self, type: str, name: str, count: int) -> str:
        if type not in CPP_TYPES:
            raise UnknownPTX(f"the type {type}")
        self.registers[name] = type
        names = [f"{name[1:]}{i}" for i in range(count)] if count else [name.lstrip("%")]
        nan = {"pred": "false", "f32": "NAN"}.get(type, f"{CPP_TYPES[type]}(-1)")
        return f"{CPP_TYPES[type]} " + ", ".join(f"{name} = {nan}" for name in names) + ";"

    def declare_bytes(self, align: str | None, type: str, name: str, count: str | None) -> str:
        """Memory for a parameter of a call."""
        size = num_bytes(type, count)
        self.symbols.add(name)
        return (
            f"alignas({align or size}) char {name}_bytes[{size}]; "
            f"const u64 {name} = address_of({name}_bytes);"
        )


def num_bytes(type: str, count: str | None) -> int:
    return BITS[type] // 8 * int(count or 1)


def statements(body: str, first_line: int) -> Iterator[tuple[int, str]]:
    """Labels, braces of scopes, declarations and instructions with the numbers of their lines."""
    begin, text = first_line, ""
    for number, line in enumerate(body.split("\n"), first_line):
        if not text:
            begin = number
        text = f"{text} {line.strip()}".strip()
        if text and (text in "{}" or text.endswith((";", ":"))):
            yield begin, text
            text = ""
    if text:
        yield begin, text


@dataclass(frozen=True)
class Translation:
    """The translation of one module. Errors call the PTX by `name`."""

    ptx: str  # without comments
    name: str

    def function(self, match: re.Match[str]) -> Iterator[str]:
        """The declaration, then the definition if this is one."""
        is_kernel = match["kind"] == "entry"
        shared = _SHARED.findall(self.ptx)
        function = Function(set(shared))
        beginning = [f"const u32 {symbol} = shared_base();" for symbol in shared]
        parameters = []
        for align, type, name, count in _PARAM.findall(f"{match['result']} {match['params']}"):
            function.symbols.add(name)
            size = num_bytes(type, count)
            if is_kernel:
                parameters.append(f"Parameter<{align or size}, {size}> {name}_bytes")
                beginning.append(f"const u64 {name} = address_of({name}_bytes.bytes);")
            else:
                parameters.append(f"u64 {name}")
        linkage = 'extern "C"' if is_kernel else "static"
        head = f"{linkage} void {match['name']}({', '.join(parameters)})"
        yield f"{head};"
        if match["end"] == "{":
            yield "\n".join([f"{head} {{", *beginning, *self.body(function, match.end()), "}"])

    def body(self, function: Function, begin: int) -> Iterator[str]:
        text = self.ptx[begin : self.ptx.index("\n}", begin)]
        for number, statement in statements(text, self.ptx.count("\n", 0, begin) + 1):
            try:
                translated = function.statement(statement)
            except ValueError as error:
                place = f"{self.name}:{number}: {statement}"
                raise UnknownPTX(f"{place}: {error}") from None
            if translated:
                yield f'#line {number} "{self.name}"\n{translated}'


def translate(ptx: str, name: str) -> str:
    """The C++ of a module, for after ptx_instructions.h."""
    translation = Translation(re.sub(r"//[^\n]*", "", ptx), name)
    matches = _FUNCTION.finditer(translation.ptx)
    parts = [part for match in matches for part in translation.function(match)]
    parts.sort(key=lambda part: "{" in part)  # declarations first
    return "\n".join(["namespace tree_attention::emulator::ptx {", *parts, "}\n"])
