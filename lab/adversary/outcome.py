# SPDX-License-Identifier: BSD-3-Clause
"""What a call did, and whether it may do that."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from tree_attention import ExchangeError

OF_ARGUMENTS = (ValueError, TypeError)
DOCUMENTED = (ValueError, TypeError, RuntimeError, NotImplementedError, ExchangeError)
# Seconds after its deadline in which a call must have ended, on a machine with other work.
SLACK = 5.0
_FIELD_AND_RANK = re.compile(
    r"\S is .* on rank \d|(the queries|query_positions) of ranks? \d"
    r"|ranks? [\d, ]+ abandoned more calls"
)
AMPLE = 20.0  # the deadline of what must succeed
SHORT = 0.6  # the deadline of what must fail by it


@dataclass(frozen=True)
class Outcome:
    seconds: float
    value: Any = None
    error: Exception | None = None

    def result(self) -> Any:
        """What the call returned, where it had to return."""
        if self.error is not None:
            raise AssertionError(f"a right call was refused: {self.error}") from self.error
        return self.value

    def refusal(self, names: Collection[str], kinds: Collection[type] = DOCUMENTED) -> str:
        """What the error says, where there had to be one that names any of `names`."""
        assert self.error is not None, f"a wrong call was accepted: {str(self.value)[:300]}"
        check_error(self.error, names, kinds)
        return str(self.error)

    def disagreement(self, kinds: Collection[type] = (ExchangeError,)) -> str:
        """What the error says, where ranks differed and it had to name a field and a rank."""
        text = self.refusal(("rank", "ranks"), kinds)
        assert _FIELD_AND_RANK.search(text), f"the error names no field and rank: {text[:300]}"
        return text


def attempt(function: Callable[..., Any], *args: Any, **options: Any) -> Outcome:
    """No call takes longer than its deadline, or ends with anything but an Exception."""
    seconds = options.get("timeout")
    seconds = seconds if type(seconds) in (int, float) and 0 < seconds < AMPLE else AMPLE
    begin = time.monotonic()
    try:
        outcome = Outcome(0.0, value=function(*args, **options))
    except Exception as error:
        outcome = Outcome(0.0, error=error)
    taken = time.monotonic() - begin
    assert taken < seconds + SLACK, f"{taken:.1f} s with a deadline of {seconds} s: {outcome}"
    return Outcome(taken, outcome.value, outcome.error)


def check_error(
    error: Exception, names: Collection[str], kinds: Collection[type] = DOCUMENTED
) -> None:
    """It is of a documented kind and a sentence to a user."""
    text = str(error)
    if type(error) not in kinds:
        allowed = ", ".join(kind.__name__ for kind in kinds)
        raise AssertionError(
            f"{type(error).__name__} is none of {allowed}: {text[:300]}"
        ) from error
    if not any(re.search(rf"\b{re.escape(name)}\b", text) for name in names):
        raise AssertionError(f"the error names none of {', '.join(names)}: {text[:300]}") from error
    if "Exception raised from" in text or re.search(r"^frame #", text, re.MULTILINE):
        raise AssertionError(f"C++ frames in a message: {text[:300]}") from error
