# SPDX-License-Identifier: BSD-3-Clause
"""The report: a line for each case, and one diagnosis for one mistake.

A mistake makes several cases fail. It is told from the numbers where they show it, from the case
otherwise, and is named once: the further cases say in which one.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .outcome import Outcome
from .truth import Floats, lse_error, merge, row_error

BASE_2_FOR_NATURAL = "natural logarithms look merged as if their base were 2"
NATURAL_FOR_BASE_2 = "logarithms to base 2 look merged as if they were natural"
LSE_TO_BASE_2 = "lse looks like a logarithm to base 2: multiply it by log(2)"
SCALED = "o is {:.3g} times what it should be: a factor is missing, or is applied twice"
SHIFTED = "lse is off by {:+.3g} in every row: a summand is missing, or is added twice"
IN_16_BITS = "an error between 2^-11 and 2^-6 is 16-bit arithmetic: merge in float32, round once"
ORDER = (
    "lse is right and o is not: the lse of parts {} weigh the o of parts 0, 1 and so on; have both "
    "the same order of ranks?"
)
EQUAL = "o is the mean of the parts: their weights are exp(lse_part - lse)"
INVERTED = "the parts are weighted by exp(-lse_part): the sign of lse is wrong"
LEFT_OUT = "this is the merge without part {}, counted from 0: it is left out"
TWICE = "this is the merge with part {} twice, counted from 0: each part is merged once"
ALONE = "this is part {} alone, counted from 0: the others are left out"
SIGN = "o is right and lse is not: it is max - log(sum of exp(lse_part - max)), where + belongs"
LARGEST = "o is right and lse is not: it is the largest of the parts', without log(sum of exp)"
O_ALONE = (
    "lse is right and o is not: the weight of a part is exp(lse_part - lse), and multiplies the o "
    "of that part"
)
ONE_MORE = (
    "a slot too many is seen: the last query sees the slots below seq_lens, which counts the new "
    "tokens too, and of these the ones of each shard, whose number is no quotient rounded up"
)
ONE_LESS = (
    "the last key is left out: the new token is written first and counted in seq_lens, and its "
    "query sees it"
)
NO_SCALE = "the scores lack their scale: q times k is multiplied by head_dim ** -0.5"
SCALE_TWICE = "the scores are scaled twice: q times k is multiplied by head_dim ** -0.5 once"
HEADS_IN_TURN = (
    "query heads take the KV heads in turn: query head h belongs to KV head h // group_size, where "
    "group_size is num_heads_q // num_heads_kv"
)
LSE_ALONE = "o is right and lse is not: it is log(sum of exp(lse_part)), a natural logarithm"
NO_STATE = (
    "return (o, lse), or o alone; for a function that writes into its arguments there is "
    "adapt(function, out=True)"
)
STAND_IN = "lse of a state without keys looks like {:.3g}: it is -inf, on each rank and at the end"
EMPTY_IS_NAN = (
    "rows of which a rank has no keys are NaN: its lse is -inf, neither +inf nor NaN, and its o is "
    "left out by selection"
)
FOR_NUMPY = (
    "the inputs are torch tensors; for a NumPy function pass --conformance-device numpy, or "
    'device="numpy" to the check'
)
# Of rows that see garbage, whose scores are large, float32 is not as right as of others.
_CLOSE = 2**-10
SHAPE = "for other axes, a packed (o | lse) or a rank's own heads there is `adapt`"


@dataclass(frozen=True)
class Line:
    """Outcome of one case."""

    case: str
    passed: bool | None  # None: the function raised NotImplementedError
    measured: str  # errors and bounds, or what was raised
    meaning: str  # what is wrong, or the case that says it; empty where nothing is known

    def __str__(self) -> str:
        result = {True: "ok", False: "FAILED", None: "not offered"}[self.passed]
        return f"{result:<12}{self.case}: {self.measured}" + (
            f"\n{'':<12}{self.meaning}" if self.meaning else ""
        )


@dataclass(frozen=True)
class Report:
    """The lines of all cases."""

    lines: tuple[Line, ...]

    @classmethod
    def of(cls, outcomes: Sequence[Outcome]) -> "Report":
        """Reports the outcomes of all cases, of which the first is the plain one."""
        failed = [x for x in outcomes if x.passed is False]
        meanings = _meanings(failed, plain=outcomes[0])
        lines = (
            Line(x.case.name, x.passed, x.measured, meanings.get(x.case.name, "")) for x in outcomes
        )
        return cls(tuple(lines))

    @property
    def passed(self) -> bool:
        """No case has failed, and not all are ones that the function does not offer."""
        return not self.failed and any(line.passed for line in self.lines)

    @property
    def failed(self) -> list[str]:
        """The names of the failed cases."""
        return [line.case for line in self.lines if line.passed is False]

    def __str__(self) -> str:
        lines = [str(line) for line in self.lines]
        if self.failed:
            failed = [line for line in self.lines if line.passed is False]
            first = next(line for line in failed if not line.meaning.startswith("as in "))
            count = f"{len(failed)} of {len(self.lines)} cases failed"
            lines.append(f"{count}: fix {first.case!r} first.")
        return "\n".join(lines)


def _meanings(failed: Sequence[Outcome], plain: Outcome) -> dict[str, str]:
    """The diagnosis of each failed case: a sentence, or the case that has it."""
    seen = {x.case.name: _recognised(x, is_plain=x is plain) for x in failed}
    stand_ins = [name for name, sentence in seen.items() if sentence.startswith(STAND_IN[:30])]
    meanings: dict[str, str] = {}
    by_name = {x.case.name: x for x in failed}

    def like(x: Outcome, other: Outcome) -> bool:
        """True if x raised nothing, or the same as the other, whose words then serve for both."""
        return not x.raised or x.raised == other.raised

    for x in failed:
        name = x.case.name
        sentence = seen[name] or (x.case.meaning if x.o is not None else "")
        said = [other for other, text in meanings.items() if text == sentence and text]
        causes = [z for z in x.case.also if z in meanings and like(x, by_name[z])]
        if x is not plain and plain.passed is False and like(x, plain):
            meanings[name] = "as in the first case"
        elif said or (causes and not seen[name]):
            meanings[name] = f"as in {(said or causes)[0]!r}"
        elif stand_ins and not (seen[name] or x.raised) and (x.parts[1] == -math.inf).any():
            meanings[name] = f"as in {stand_ins[0]!r}"
        else:
            meanings[name] = sentence
    return meanings


def _recognised(x: Outcome, is_plain: bool) -> str:
    """The mistake that the numbers show; empty if they show none."""
    if x.o is None:
        if x.raised and re.search(r"unsupported ScalarType|torch\.return_types", x.measured):
            return FOR_NUMPY
        if x.measured.endswith(" was returned"):
            return NO_STATE
        return SHAPE if "shape" in x.measured else ""
    sentence = _stand_in(x)
    if not sentence and is_plain:
        sentence = _of_lse(x) if x.o_error <= x.o_bound else _of_o(x)
    return sentence


def _of_o(x: Outcome) -> str:
    """The mistake of a plain case with a wrong o."""
    o_parts, lse_parts = x.parts
    for mistake, o in x.mistaken.items():
        known = ~np.isnan(o).any(-1)
        if row_error(x.o[known], o[known]) <= max(x.o_bound, _CLOSE):
            return mistake
    for factor, sentence in (
        (math.log(2), BASE_2_FOR_NATURAL),
        (1 / math.log(2), NATURAL_FOR_BASE_2),
    ):
        if row_error(x.o, merge(o_parts, factor * lse_parts)[0]) <= x.o_bound:
            return sentence
    o_true = x.true[0]
    large = np.abs(o_true) > np.abs(o_true).max(-1, keepdims=True) / 8
    ratio = _constant(x.o[large] / o_true[large])
    if ratio:
        return SCALED.format(ratio)
    if x.dtype == "float32" and 2**-11 <= x.o_error <= 2**-6:
        return IN_16_BITS
    return _of_parts(x) or (O_ALONE if _is_lse(x, x.true[1]) else "")


def _of_parts(x: Outcome) -> str:
    """The mistake of a wrong o that comes of the parts' own numbers."""
    (o_parts, lse_parts), every = x.parts, np.arange(len(x.parts[0]))

    def is_o(o: Floats) -> bool:
        return row_error(x.o, o) <= x.o_bound

    for i in every:
        if is_o(o_parts[i]):
            return ALONE.format(i)
    for i in every:
        if is_o(merge(*(np.delete(parts, i, 0) for parts in x.parts))[0]):
            return LEFT_OUT.format(i)
    for i in every:
        again = np.append(every, i)
        if is_o(merge(o_parts[again], lse_parts[again])[0]):
            return TWICE.format(i)
    for order in (every[::-1], *(np.roll(every, shift) for shift in every[1:])):
        if is_o(merge(o_parts, lse_parts[order])[0]):
            return ORDER.format(", ".join(map(str, order)))
    if is_o(merge(o_parts, -lse_parts)[0]):
        return INVERTED
    return EQUAL if is_o(o_parts.mean(0)) else ""


def _is_lse(x: Outcome, lse: Floats) -> bool:
    return x.lse is not None and lse_error(x.lse, lse) <= x.lse_bound


def _of_lse(x: Outcome) -> str:
    """The mistake of a plain case with a right o and a wrong lse."""
    ratio, shift = _constant(x.lse / x.true[1]), _constant(x.lse - x.true[1])
    if ratio is not None and abs(ratio * math.log(2) - 1) < 1e-3:
        return LSE_TO_BASE_2
    if shift is not None:
        return SHIFTED.format(shift)
    largest = x.parts[1].max(0)
    if _is_lse(x, largest - (x.true[1] - largest)):
        return SIGN
    return LARGEST if _is_lse(x, largest) else LSE_ALONE


def _constant(x: Floats) -> float | None:
    """The number that all are but for a thousandth; None if they differ or are not finite."""
    middle = float(np.median(x))
    return middle if bool((np.abs(x - middle) <= 1e-3 * abs(middle)).all()) else None


def _stand_in(x: Outcome) -> str:
    """The mistake of giving a state without keys another lse than -inf."""
    o_parts, lse_parts = x.parts
    empty = lse_parts == -math.inf
    nowhere, somewhere = empty.all(0), empty.any(0) & ~empty.all(0)
    if x.lse is not None and nowhere.any():
        values = np.unique(x.lse[nowhere])
        if len(values) == 1 and values[0] != -math.inf and not np.isnan(values[0]):
            merged_zeros = math.isclose(values[0], math.log(len(lse_parts)), rel_tol=1e-6)
            return STAND_IN.format(0.0 if merged_zeros else values[0])
    if not somewhere.any():
        return ""
    if x.lse is not None and (x.lse[somewhere] == math.inf).all():
        return STAND_IN.format(math.inf)
    as_if_0 = merge(np.where(empty[..., None], 0.0, o_parts), np.where(empty, 0.0, lse_parts))[0]
    if row_error(x.o[somewhere], as_if_0[somewhere]) <= x.o_bound:
        return STAND_IN.format(0.0)
    is_nan, is_decode = np.isnan(x.o).any(-1), hasattr(x.case, "seq_lens")
    return EMPTY_IS_NAN if is_decode and (is_nan == somewhere)[~nowhere].all() else ""
