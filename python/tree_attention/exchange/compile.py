# SPDX-License-Identifier: BSD-3-Clause
"""Collective functions as operators that a compiled graph can hold.

`torch.compile` traces no process group. While it traces, a collective function calls the operator
of its name instead, which calls the function when the graph runs. A group is a string there.
Operators have an order among them, so that every rank runs those of a graph in the order of the
program.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_library = torch.library.Library("tree_attention", "FRAGMENT")


def add_collective(
    schema: str, function: Callable[..., object], fake: Callable[..., object]
) -> Any:
    """The operator of a schema, which calls `function`; `fake` makes outputs from shapes alone."""
    _library.define(schema)
    name = schema.partition("(")[0]
    _library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tree_attention::{name}", fake, lib=_library)
    op = getattr(torch.ops.tree_attention, name).default
    torch.library._register_effectful_op(op, torch.library.EffectType.ORDERED, lib=_library)
    return op
