# SPDX-License-Identifier: BSD-3-Clause
"""Variables of the environment, which launchers, clusters and templates set: the one reader."""

import os
import re

COSTS_VARIABLE = "TREE_ATTENTION_COSTS"  # names a file that `calibrate` wrote


class VariableError(ValueError):
    """A variable has a value that cannot be used; the message has name, requirement and value."""

    def __init__(self, name: str, requirement: str, why: str = "") -> None:
        value = os.environ.get(name)
        got = "and is not set" if value is None else f"got {value!r}"
        super().__init__(f"{name} must be {requirement}, {got}{why and f': {why}'}")


def read_integer(name: str, least: int, most: int, default: int | None = None) -> int:
    """The integer that a variable holds, or `default` where it is not set.

    Raises:
        VariableError: it is no decimal integer from `least` to `most`, or not set without a
            default. An empty value is no integer.
    """
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    # Not all that int() takes: other scripts' digits, spaces and underscores are slips.
    # Without this: a rank number of other digits is taken, or any text at all.
    if text is None or not re.fullmatch("-?[0-9]{1,18}", text) or not least <= int(text) <= most:
        kind = f"{least}" if least == most else f"an integer from {least} to {most}"
        raise VariableError(name, kind)
    return int(text)
