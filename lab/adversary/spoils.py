# SPDX-License-Identifier: BSD-3-Clause
"""Ways to make a right call wrong, each by one argument."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from random import Random
from typing import Any

import torch
from torch import Tensor

from .outcome import OF_ARGUMENTS

Arguments = dict[str, Any]
NAN, INF = math.nan, math.inf


@dataclass(frozen=True)
class Spoil:
    """Replaces one argument by something that no call can take."""

    argument: str
    what: str
    value: Callable[[Arguments], Any]
    needs_tensor: bool = True  # whether there must be one to spoil

    def apply(self, arguments: Arguments) -> Arguments:
        return arguments | {self.argument: self.value(arguments)}

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        return (RuntimeError,) if self.what == "gradient" else OF_ARGUMENTS

    def __str__(self) -> str:
        return f"{self.argument}: {self.what}"


def _tensor(argument: str, **changes: Callable[[Tensor], Any]) -> list[Spoil]:
    return [
        Spoil(argument, what.replace("_", " "), lambda a, f=f: f(a[argument]))
        for what, f in changes.items()
    ]


def _values(argument: str, *values: Any) -> list[Spoil]:
    return [
        Spoil(argument, repr(value)[:60], lambda a, value=value: value, False) for value in values
    ]


def _is_tensor(name: str) -> list[Spoil]:
    return _tensor(
        name,
        none=lambda x: None,
        text=lambda x: "text",
        a_list=lambda x: x.tolist(),
        an_array=lambda x: x.float().numpy(),
        on_meta=lambda x: x.to("meta"),
        five_axes=lambda x: x[None],
        three_axes=lambda x: x.sum(0),
        no_axes=lambda x: x.sum(),
    )


def _floating(name: str) -> list[Spoil]:
    return _tensor(
        name,
        float64=Tensor.double,
        int32=Tensor.int,
        boolean=Tensor.bool,
        complex=lambda x: x.to(torch.complex64),
        float8=lambda x: x.to(torch.float8_e4m3fn),
        strided_last_axis=lambda x: x.repeat_interleave(2, -1)[..., ::2] if x.shape[-1] > 1 else 1,
        without_head_dim=lambda x: x[..., :0],
    )


def _with_gradient(x: Tensor) -> Tensor:
    with torch.inference_mode(False), torch.enable_grad():
        return x.clone().requires_grad_()


_TENSORS = [
    *(spoil for name in ("q", "k", "v") for spoil in (*_is_tensor(name), *_floating(name))),
    *_tensor("q", gradient=_with_gradient),
    *_tensor(
        "k",
        a_head_too_many=lambda x: x.repeat(1, 64, 1, 1),
        without_heads=lambda x: x[:, :0],
        another_head_dim=lambda x: torch.cat([x, x], -1),
    ),
    *_tensor("v", a_key_too_many=lambda x: torch.nn.functional.pad(x, (0, 0, 0, 1))),
]  # fmt: skip

# Of lean_decode, tree_decode and both rings.
DECODE = [
    *_TENSORS,
    *_tensor(
        "key_ranges",
        int64=Tensor.long,
        float32=Tensor.float,
        a_query_too_many=lambda x: x.repeat(1, 2, 1)[:, : x.shape[1] + 1] if x.shape[1] else "none",
        three_numbers=lambda x: torch.cat([x, x], -1)[..., :3],
        flat=lambda x: x.flatten(),
        on_meta=lambda x: x.to("meta"),
        a_list=lambda x: x.tolist(),
    ),
    *_tensor(
        "page_table",
        int64=Tensor.long,
        one_axis=lambda x: x.flatten(),
        a_sequence_too_many=lambda x: torch.cat([x, x[:1]]) if len(x) else "none",
        on_meta=lambda x: x.to("meta"),
    ),
    *_tensor(
        "alibi_slopes",
        float64=Tensor.double,
        a_head_too_many=lambda x: torch.cat([x, x[:1]]),
        a_number=lambda x: 0.5,
        on_meta=lambda x: x.to("meta"),
    ),
    *_tensor(
        "query_positions",
        int32=Tensor.int,
        flat=lambda x: x.flatten() if x.numel() > 1 else x[0, 0] if x.numel() else "none",
        on_meta=lambda x: x.to("meta"),
    ),
    *_values("softmax_scale", NAN, INF, -INF, 1e300, "1", [1.0], 1j),
    *_values("softcap", NAN, INF, -1.0, 1e300, 1e-300, "1", None),
    *_values("key_layout", (0, 1), (-1, 1, 1), (0, 0, 1), (0, 2, 1), (0, 1, 2**63), "011", 1, None,
             (0.5, 1, 1), (0, 1, 1, 1)),
    *_values("num_workers", -2, 2**40, 2**70, "1", 1.5, None),
    *_values("no_such_option", 1),
]  # fmt: skip

OUT_DTYPE = _values(
    "out_dtype", torch.float64, torch.int32, torch.bool, torch.complex64, "float32", 7
)

# Of what sends.
TIMEOUTS = _values(
    "timeout", INF, -INF, NAN, 0, 0.0, -1, -0.5, "5", [1], 10**400, timedelta(0), timedelta(-1),
    torch.float32, 1j,
)  # fmt: skip
RIGHT_TIMEOUTS = _values("timeout", timedelta(seconds=20), 20, 1e6)
# Right or wrong, as the operator likes.
ODD_TIMEOUTS = _values("timeout", True, Decimal(20), 1e9, 1e300)
STRATEGIES = _values("strategy", "telepathy", "", None, 1, ["all_gather"], b"auto")
TREE = [
    *OUT_DTYPE,
    *STRATEGIES,
    *_values("payload_dtype", torch.float16, torch.float64, torch.int8, "bfloat16", None, 1),
    *_values("group", "world", 1, object()),
]

# Of all_merge_states and, with their own names, of merge_states.
STATES = [
    *(spoil for name in ("o", "lse") for spoil in _is_tensor(name)),
    *_tensor(
        "o",
        float64=Tensor.double,
        int32=Tensor.int,
        complex=lambda x: x.to(torch.complex64),
        without_head_dim=lambda x: x[..., :0],
        gradient=_with_gradient,
    ),
    *_tensor("lse", float64=Tensor.double, bfloat16=Tensor.bfloat16, gradient=_with_gradient),
]
SUMS = [
    *_tensor(
        "x",
        none=lambda x: None,
        text=lambda x: "text",
        a_list=lambda x: x.tolist(),
        int32=Tensor.int,
        boolean=Tensor.bool,
        complex=lambda x: x.to(torch.complex64),
        gradient=_with_gradient,
        sparse=lambda x: x.float().to_sparse(),
        on_meta=lambda x: x.to("meta"),
    ),
    *_values("payload_dtype", torch.float16, torch.float64, torch.int8, "bfloat16", 1),
]


def draw(rng: Random, spoils: list[Spoil], arguments: Arguments) -> Spoil:
    """One of them that can be applied. Ranks whose arguments are of the same kind draw alike."""
    able = [s for s in spoils if not s.needs_tensor or isinstance(arguments[s.argument], Tensor)]
    return rng.choice(able)
