# SPDX-License-Identifier: BSD-3-Clause
"""What a function returned for one case, the right result, and whether the two agree."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from .arrays import dtype_of, to_numpy
from .cases import DecodeCase, MergeCase
from .truth import EPS, Floats, lse_error, row_error

# What a plain implementation in 16 bits is wrong by must not widen a bound to accept anything.
WIDEST = 1 / 16


@dataclass(frozen=True)
class Outcome:
    case: MergeCase | DecodeCase
    true: tuple[Floats, Floats]  # o and lse
    parts: tuple[Floats, Floats]  # the states that are merged, with natural logarithms
    plain_o_error: float  # of a plain implementation
    plain_lse_error: float
    dtype: str  # of the inputs
    # o of mistakes in attention, by what says them; NaN in rows of which nothing is known.
    mistaken: Mapping[str, Floats] = field(default_factory=dict)
    passed: bool | None = False  # None: the function raised NotImplementedError
    measured: str = ""  # errors and bounds, or what was raised
    raised: str = ""  # the name of the exception that failed the case
    # What the function returned, in float64; None without one, or with one of another shape.
    o: Any = None
    lse: Any = None
    o_error: float = math.nan
    o_bound: float = WIDEST
    lse_bound: float = math.nan


def run(outcome: Outcome, function: Callable[[], Any]) -> Outcome:
    """Calls the function and judges what it returns."""
    try:
        result = function()
    except NotImplementedError as error:
        return replace(outcome, passed=None, measured=f"NotImplementedError: {error}")
    except Exception as error:
        name = type(error).__name__
        return replace(outcome, measured=f"{name}: {error}", raised=name)
    if wrong := _not_a_state(result):
        return replace(outcome, measured=f"{wrong} was returned")
    o, lse = result if isinstance(result, tuple | list) else (result, None)
    for name, x, true in zip(("o", "lse"), (o, lse), outcome.true, strict=True):
        if x is not None and tuple(x.shape) != true.shape:
            measured = f"{name} has the shape {list(x.shape)}, expected {list(true.shape)}"
            return replace(outcome, measured=measured)
    return _judged(outcome, to_numpy(o), None if lse is None else to_numpy(lse), dtype_of(o))


def _not_a_state(result: Any) -> str:
    """Words for what is neither o nor (o, lse); empty for what is."""
    is_pair = isinstance(result, tuple | list)
    if is_pair and len(result) != 2:
        return f"a {type(result).__name__} of {len(result)}"
    o, lse = result if is_pair else (result, None)
    for x in (o,) if lse is None else (o, lse):
        if not (hasattr(x, "shape") and hasattr(x, "dtype")):
            return "None" if x is None else f"a {type(x).__name__}"
    return ""


def _judged(outcome: Outcome, o: Floats, lse: Floats | None, dtype: str) -> Outcome:
    """Compares with bounds: twice the errors of a plain implementation, and one rounding of o to
    the coarser one of its and the inputs' dtypes, or four of lse to float32."""
    o_true, lse_true = outcome.true
    known = ~np.isnan(lse_true)
    lost = np.isfinite(o[~known]).all(-1).any()  # a NaN that has not arrived
    o_error = math.nan if lost else row_error(o[known], o_true[known])
    o_bound = min(2 * outcome.plain_o_error + max(EPS[dtype], EPS[outcome.dtype]), WIDEST)
    lse_bound = 2 * outcome.plain_lse_error + 4 * EPS["float32"]
    passed, measured = o_error <= o_bound, f"o {o_error:.1e} (bound {o_bound:.1e}), lse "
    if lse is None:
        measured += "not given"
    else:
        error = lse_error(lse[known], lse_true[known])
        measured += f"{error:.1e} (bound {lse_bound:.1e})"
        passed = passed and error <= lse_bound  # a NaN is not
    judged = replace(outcome, passed=bool(passed), measured=measured)
    return replace(judged, o=o, lse=lse, o_error=o_error, o_bound=o_bound, lse_bound=lse_bound)
