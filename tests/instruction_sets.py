# SPDX-License-Identifier: BSD-3-Clause
"""The instruction sets of this CPU, and problems of many rows, for which each has a path."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from emulated_amx import emulated_amx
from tree_attention import _C


def supported() -> list[str]:
    """The one in use first; the last one runs everywhere."""
    with pytest.raises(ValueError) as error:
        _C.set_cpu_instruction_set("mmx")
    message = re.fullmatch(
        r"set_instruction_set: name must be one of (\w+(, \w+)*), got mmx", str(error.value)
    )
    assert message
    return message[1].split(", ")


NAMES = ("amx", "avx512_bf16", "avx512", "avx2", "neon_bf16", "neon", "portable")
# One text for all, over vectors: the widest and the narrowest find most of its mistakes.
QUICK = (supported()[0], supported()[-1])


@contextmanager
def use(name: str) -> Iterator[None]:
    """AMX is emulated where the CPU lacks only its tiles. What helpers.py allows avx512_bf16 only
    is then asked for as well."""
    if name == "amx" and name not in supported() and "avx512_bf16" in supported():
        with emulated_amx(), use("avx512"):
            yield
        return
    if name not in supported():
        pytest.skip(f"no {name} on this CPU or in this build")
    before = _C.cpu_instruction_set()
    _C.set_cpu_instruction_set(name)
    try:
        yield
    finally:
        _C.set_cpu_instruction_set(before)


# Many rows: matrix units take other paths then.
MANY_ROWS = {
    "all": {"seqlen_q": 40, "seqlen_k": 300},
    "causal": {"seqlen_q": 130, "ranges": "causal", "seqlen_k": 700},
    "first keys": {"seqlen_q": 150, "ranges": "causal", "seqlen_k": 150, "group_size": 5},
    "window": {"seqlen_q": 300, "ranges": "window", "seqlen_k": 600, "group_size": 1},
    "random": {"seqlen_q": 64, "ranges": "random", "seqlen_k": 200},
    "ragged": {"seqlen_q": 20, "ranges": "ragged", "layout": "BSHD", "batch": 4},
    "flushes": {"seqlen_q": 24, "ranges": "causal", "seqlen_k": 4500, "batch": 1},
    "two outputs": {"seqlen_q": 333, "ranges": "causal", "seqlen_k": 400, "num_heads_kv": 1},
    "pages": {
        "seqlen_q": 50,
        "ranges": "causal",
        "page_size": 16,
        "seqlen_k": 390,
        "layout": "BSHD",
    },
    "values": {"seqlen_q": 70, "ranges": "causal", "head_dim": 96, "head_dim_v": 32},
    "d 256": {"seqlen_q": 30, "ranges": "causal", "head_dim": 256, "seqlen_k": 280},
    "alibi": {"seqlen_q": 40, "ranges": "causal", "alibi": 1 / 64, "seqlen_k": 300},
    "softcap": {"seqlen_q": 40, "ranges": "causal", "softcap": 5.0, "score_size": 3.0},
    "negative": {"seqlen_q": 40, "ranges": "causal", "softmax_scale": -0.4, "score_size": 3.0},
    "no scale": {"seqlen_q": 40, "ranges": "causal", "softmax_scale": 0.0},
}
