# SPDX-License-Identifier: BSD-3-Clause
"""Numbers that callers give, of Python, numpy or torch: checked and converted to Python's once.

Whoever takes one keeps the result. A tensor that was kept could be changed later by who holds it,
numbers of numpy overflow at their own size, and ranks compare what a number looks like.
"""

import operator
import sys
from collections.abc import Sequence
from numbers import Real
from typing import Any, cast

import numpy as np

# Lists of numbers other than tensors: types that have an order to iterate in.
_LISTS = (Sequence, np.ndarray)
# The largest integer that tensors and the operators' C++ hold.
MAX_INTEGER = (1 << 63) - 1
# The longest time that ranks may be told to wait, 115 days, and the time that an exchange waits for
# an answer by default.
MAX_SECONDS = 10_000_000
DEFAULT_TIMEOUT = 30.0


def as_integer(value: object) -> int | None:
    """The integer that `value` is, of whatever library; None for anything else, also for booleans
    and for numbers with a fraction that happens to be zero."""
    if type(value) is int:
        return value
    value = _scalar(value)
    if isinstance(value, bool | np.bool_) or _is_tensor(value):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def as_integers(value: object) -> list[int] | None:
    """The integers in a list, array or tensor of one axis; None if an element is not an integer."""
    is_list = isinstance(value, _LISTS) and not isinstance(value, bytes | bytearray)
    if not is_list and not _is_tensor(value):
        return None
    if getattr(value, "ndim", 1) != 1:
        return None
    found = list(map(as_integer, cast("Sequence[object]", value)))
    return None if None in found else cast("list[int]", found)


def as_real(value: object) -> float | None:
    """The number that `value` is; None for anything else, also for booleans."""
    if type(value) is float:
        return value
    value = _scalar(value)
    if isinstance(value, bool | np.bool_) or not isinstance(value, Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def as_boolean(value: object) -> bool | None:
    """The truth value that `value` is; None for anything else, also for the numbers 0 and 1."""
    value = _scalar(value)
    return bool(value) if isinstance(value, bool | np.bool_) else None


def integer(
    op: str, name: str, value: object, least: int | None = None, most: int | None = None
) -> int:
    """The integer that the argument `name` of `op` is.

    Raises:
        TypeError: it is no integer.
        ValueError: it is below `least` or above `most`.
    """
    found = as_integer(value)
    is_right = found is not None and (least is None or least <= found)
    if found is not None and is_right and (most is None or found <= most):
        return found
    kind = "" if least is None else f" of at least {least}"
    kind = kind if most is None else f" from {least} to {most}"
    error = TypeError if found is None else ValueError
    raise error(f"{op}: {name} must be an integer{kind}, got {shown(value)}")


def real(op: str, name: str, value: object) -> float:
    """The number that the argument `name` of `op` is, or TypeError."""
    found = as_real(value)
    if found is None:
        raise TypeError(f"{op}: {name} must be a number, got {shown(value)}")
    return found


def boolean(op: str, name: str, value: object) -> bool:
    """The truth value that the argument `name` of `op` is, or TypeError."""
    found = as_boolean(value)
    if found is None:
        raise TypeError(f"{op}: {name} must be True or False, got {shown(value)}")
    return found


def in_digits(value: float) -> str:
    """The value with three digits, or from 100 on as a whole number."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def shown(value: object) -> str:
    """The text of a value that a caller gave, on one line and shortened."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # Python does not write integers of more than 4,300 digits
        text = f"{type(value).__name__} with a number too long to write"
    return f"{text:.80}"


def _scalar(value: Any) -> object:
    """The number that a tensor or an array without axes holds; anything else as it is."""
    if _is_tensor(value):
        return value if value.dim() or value.is_meta or value.requires_grad else value.item()
    if isinstance(value, np.ndarray) and value.ndim == 0:
        return value.item()
    return value


def _is_tensor(value: object) -> bool:
    """True for a tensor of torch: there is none where nobody has imported that, and plans are
    made without it."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)
