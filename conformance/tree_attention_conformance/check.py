# SPDX-License-Identifier: BSD-3-Clause
"""Checks of an engine's merge, and of its decoding over shards, where such code is often wrong."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from .arrays import default_device, to
from .cases import DECODE_CASES, MERGE_CASES, DecodeCase, DecodeProblem, MergeCase, views
from .diagnosis import HEADS_IN_TURN, NO_SCALE, ONE_LESS, ONE_MORE, SCALE_TWICE, Report
from .outcome import Outcome, run
from .truth import EPS, Floats, attention, lse_error, merge, row_error


def check_merge(
    function: Callable[[Any, Any], Any], *, num_parts: int = 3, device: str | None = None
) -> Report:
    """Checks a merge of partial attention states.

    Args:
        function: takes `o_parts [num_parts, batch, num_heads_q, seqlen_q, head_dim]`, float32 and
            in one case of 16 bits, and float32 `lse_parts [num_parts, batch, num_heads_q,
            seqlen_q]`, natural logarithms, -inf for empty parts; returns `o` and `lse` without the
            first axis, or `o` and None. An all-reduce of world_size ranks has as many parts and
            takes its own. `adapt` makes such a function of one with other conventions.
        device: where the parts are, as torch says it, or "numpy" for NumPy's arrays, the default
            without torch. They have float16 for bfloat16.

    For example::

        from tree_attention import merge_states
        from tree_attention.reference.conformance import check_merge

        report = check_merge(merge_states)
        print(report.passed)  # True
    """
    if num_parts < 2:
        raise ValueError(f"check_merge: num_parts must be at least 2, got {num_parts}")
    device = device or default_device()

    def outcome(case: MergeCase) -> Outcome:
        dtype = of_16_bits(device) if case.of_16_bits else "float32"
        o_parts, lse_parts = case.parts(num_parts, dtype)
        o_true, lse_true = merge(o_parts, lse_parts)
        # A row that is NaN must be NaN in o; it takes no part in the comparison of numbers.
        known = ~np.isnan(lse_true)
        # What a merge is defined to be, in float32.
        with np.errstate(all="ignore"):
            lse_plain = np.logaddexp.reduce(lse_parts, 0)
            weights = np.exp(lse_parts - lse_plain)[..., None]
            empty = (lse_parts == -math.inf)[..., None]
            o_plain = np.where(empty, np.float32(0), weights * o_parts).sum(0)
        plain_lse_error = lse_error(lse_plain[known], lse_true[known])
        # A merge rounds its lse, which moves weights by that much.
        rounding = EPS["float32"] * np.abs(lse_true[np.isfinite(lse_true)]).max()
        plain_errors = max(row_error(o_plain[known], o_true[known]), rounding), plain_lse_error
        place = to(device, dtype), to(device, "float32")
        if case.views:
            inputs = views(o_parts, place[0]), views(lse_parts[..., None], place[1])[..., 0]
        else:
            inputs = place[0](o_parts), place[1](lse_parts)
        parts = o_parts, lse_parts
        made = Outcome(case, (o_true, lse_true), parts, *plain_errors, dtype)
        return run(made, lambda: function(*inputs))

    return Report.of([outcome(case) for case in MERGE_CASES])


def check_sharded_decode(
    function: Callable[[DecodeProblem], Any],
    *,
    world_size: int = 3,
    dtype: str = "float32",
    device: str | None = None,
) -> Report:
    """Checks attention of the last tokens of some sequences to a cache that is split over ranks.

    Args:
        function: takes a `DecodeProblem`, puts the shards where the engine wants them, on a rank of
            a real world its own shard only, and returns the merged `o` and `lse`, a natural
            logarithm, or `o` and None. It may raise NotImplementedError for a problem that the
            engine does not offer. `adapt` makes such a function of one with other conventions.
        dtype: of q, k and v where the case does not say it: "float32", "bfloat16" or "float16".
        device: where q and the shards are, see `check_merge`.

    For example::

        import torch
        from tree_attention import lean_decode, merge_states
        from tree_attention.reference.conformance import DecodeProblem, check_sharded_decode

        def decode(problem: DecodeProblem) -> tuple[torch.Tensor, torch.Tensor]:
            states = []
            for rank, (k, v) in enumerate(zip(problem.k_shards, problem.v_shards)):
                key_ranges = torch.as_tensor(problem.key_ranges(rank)).int()
                states.append(lean_decode(problem.q, k, v, key_ranges, out_dtype=torch.float32))
            o_parts, lse_parts = zip(*states)
            out_dtype = problem.q.dtype
            return merge_states(torch.stack(o_parts), torch.stack(lse_parts), out_dtype=out_dtype)

        print(check_sharded_decode(decode).passed)  # True
    """
    if world_size < 2:
        raise ValueError(f"check_sharded_decode: world_size must be at least 2, got {world_size}")
    device = device or default_device()

    def outcome(case: DecodeCase) -> Outcome:
        kind = of_16_bits(device) if case.of_16_bits else dtype
        problem, expected = prepare(case, world_size, kind)
        place, on_cpu = to(device, kind), to("numpy" if device == "numpy" else "cpu")
        placed = (lambda x: views(x, place)) if case.views else place
        given = replace(
            problem,
            q=placed(problem.q),
            k_shards=tuple(map(placed, problem.k_shards)),
            v_shards=tuple(map(placed, problem.v_shards)),
            seq_lens=on_cpu(problem.seq_lens),
            slots=tuple(map(on_cpu, problem.slots)),
        )
        return run(expected, lambda: function(given))

    return Report.of([outcome(case) for case in DECODE_CASES])


def prepare(case: DecodeCase, world_size: int, dtype: str) -> tuple[DecodeProblem, Outcome]:
    """The problem in NumPy's arrays, and the right result, before the function has run."""
    problem, k, v = case.make(world_size, dtype)
    true = attention(problem.q, k, v, problem.key_ranges())
    plain = attention(problem.q, k, v, problem.key_ranges(), "float32")
    plain_o = plain[0]
    if dtype != "float32":
        plain_o = attention(problem.q, k, v, problem.key_ranges(), dtype)[0]
    # Scores are rounded where their summands are added, which moves weights by that much.
    sizes = attention(np.abs(problem.q), np.abs(k), v, problem.key_ranges())[1]
    plain_o_error = max(row_error(plain_o, true[0]), EPS["float32"] * sizes.max())
    plain_errors = plain_o_error, lse_error(plain[1], true[1])
    states = [
        attention(problem.q, *shards, problem.key_ranges(rank))
        for rank, shards in enumerate(zip(problem.k_shards, problem.v_shards, strict=True))
    ]
    o_parts, lse_parts = (np.stack(x) for x in zip(*states, strict=True))
    mistaken = _mistaken(problem, k, v) if case is DECODE_CASES[0] else {}
    return problem, Outcome(case, true, (o_parts, lse_parts), *plain_errors, dtype, mistaken)


def _mistaken(problem: DecodeProblem, k: Floats, v: Floats) -> dict[str, Floats]:
    """o of engines that see other keys, scale otherwise, or pair the heads otherwise."""
    q, ranges, found = problem.q, problem.key_ranges(), {}
    for shift, mistake in ((-1, ONE_LESS), (1, ONE_MORE)):
        o = attention(q, k, v, ranges + np.array([0, shift], np.int32))[0]
        o[problem.seq_lens + shift > k.shape[2]] = math.nan  # which have no more slots
        found[mistake] = o
    root = q.shape[3] ** 0.5
    for factor, mistake in ((root, NO_SCALE), (1 / root, SCALE_TWICE)):
        found[mistake] = attention(factor * q, k, v, ranges)[0]
    in_turn = np.arange(q.shape[1]).reshape(-1, k.shape[1]).T.ravel()
    back = np.argsort(in_turn)
    found[HEADS_IN_TURN] = attention(q[:, in_turn], k, v, ranges)[0][:, back]
    return found


def of_16_bits(device: str) -> str:
    return "float16" if device == "numpy" else "bfloat16"
