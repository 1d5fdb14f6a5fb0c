# SPDX-License-Identifier: BSD-3-Clause
"""Checks of an engine's merge, and of its decoding over shards, where such code is often wrong.

Both call a function of any engine on cases that are known to go wrong, compare with float64 and
return a `Report`, which prints one line per case. Where the function is a collective, every rank
makes the same call.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .accuracy import Accuracy, Float64Check, bound_of_lse, bound_of_o, lse_error, row_error
from .attention import attention, merge_states
from .conformance_cases import (
    DECODE_CASES,
    MERGE_CASES,
    DecodeCase,
    DecodeProblem,
    MergeCase,
    views,
)

State = tuple[Tensor, Tensor | None]


@dataclass(frozen=True)
class Line:
    """Outcome of one case."""

    case: str
    passed: bool | None  # None: the function raised NotImplementedError
    measured: str  # errors and bounds, or what was raised
    meaning: str  # what wrong numbers of this case usually mean; empty if there are none

    def __str__(self) -> str:
        result = {True: "ok", False: "FAILED", None: "not offered"}[self.passed]
        return f"{result:<12}{self.case}: {self.measured}" + (
            f"\n{'':<12}{self.meaning}" if self.meaning else ""
        )


@dataclass(frozen=True)
class Report:
    """The lines of all cases."""

    lines: tuple[Line, ...]

    @property
    def passed(self) -> bool:
        """No case has failed, and not all are ones that the function does not offer."""
        return not self.failed and any(line.passed for line in self.lines)

    @property
    def failed(self) -> list[str]:
        """The names of the failed cases."""
        return [line.case for line in self.lines if line.passed is False]

    def __str__(self) -> str:
        first, *others = self.lines
        if first.passed is not False:
            return "\n".join(map(str, self.lines))
        # The plain case, whose mistake is in all others.
        lines = map(str, (first, *(replace(line, meaning="") for line in others)))
        return "\n".join((*lines, "The first case is the plain one: mend it before the others."))


def check_merge(
    merge: Callable[[Tensor, Tensor], State],
    *,
    num_parts: int = 3,
    lse_base: float = math.e,
    device: torch.device | str = "cpu",
) -> Report:
    """Checks a merge of partial attention states.

    Args:
        merge: takes `o_parts [num_parts, batch, num_heads_q, seqlen_q, head_dim]`, float32 and in
            one case bfloat16, and float32 `lse_parts [num_parts, batch, num_heads_q, seqlen_q]`,
            -inf for empty parts; returns `o` and `lse` without the first axis, or `o` and None.
            An all-reduce of world_size ranks has as many parts and takes its own.
        lse_base: base of the logarithms that the merge takes and returns; 2 for some engines.
        device: where the parts are.
    """
    if num_parts < 2:
        raise ValueError(f"check_merge: num_parts must be at least 2, got {num_parts}")

    def line(case: MergeCase) -> Line:
        o_parts, lse_parts = case.parts(num_parts)
        natural = math.log(lse_base) * lse_parts.double()
        o_true, lse_true = merge_states(o_parts, natural)
        # A row that is NaN must be NaN in o; it takes no part in the comparison of numbers.
        known = ~lse_true.isnan()
        # What `tree_attention.merge_states` documents, in float32.
        empty, lse_plain = (natural == -math.inf)[..., None], natural.float().logsumexp(0)
        weights = (natural.float() - lse_plain).exp()[..., None].masked_fill(empty, 0)
        o_plain = (weights * o_parts.float().masked_fill(empty, 0)).sum(0)
        # A merge rounds its lse, which moves weights by that much; and plain PyTorch is wrong where
        # lse is huge. Neither may widen the bounds beyond what the coarsest dtype resolves.
        size = lse_true.masked_fill(~lse_true.isfinite(), 0).abs().max().item()
        rounding = torch.finfo(torch.float32).eps * size
        limit = torch.finfo(torch.bfloat16).eps
        plain_error = min(max(row_error(o_plain[known], o_true[known]), rounding), limit)
        lse_plain_error = min(lse_error(lse_plain[known], lse_true[known]), limit)

        def judge(o: Tensor, lse: Tensor | None) -> Accuracy:
            lost = o.isfinite().all(-1)[~known].any()  # a NaN that has not arrived
            coarser = max(o.dtype, o_parts.dtype, key=lambda dtype: torch.finfo(dtype).eps)
            return Accuracy(
                math.nan if lost else row_error(o[known], o_true[known]),
                bound_of_o(plain_error, coarser),
                0.0 if lse is None else lse_error(lse[known], lse_true[known]),
                bound_of_lse(lse_plain_error),
            )

        inputs = o_parts.to(device, copy=True), lse_parts.to(device, copy=True)
        if case.views:
            inputs = views(inputs[0]), views(inputs[1][..., None])[..., 0]
        return _line(case, lambda: merge(*inputs), lse_base, judge, (o_parts, natural), o_true)

    return Report(tuple(map(line, MERGE_CASES)))


def check_sharded_decode(
    decode: Callable[[DecodeProblem], State],
    *,
    world_size: int = 3,
    lse_base: float = math.e,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Report:
    """Checks attention of the last tokens of some sequences to a cache that is split over ranks.

    Args:
        decode: takes a `DecodeProblem`, puts the shards where the engine wants them, on a rank of a
            real world its own shard only, and returns the merged `o` and `lse`, or `o` and None.
            It may raise NotImplementedError for a problem that the engine does not offer.
        lse_base: base of the returned logarithm.
        dtype: of q, k and v where the case does not say it.
        device: where q and the shards are.
    """
    if world_size < 2:
        raise ValueError(f"check_sharded_decode: world_size must be at least 2, got {world_size}")

    def line(case: DecodeCase) -> Line:
        problem, k, v = case.make(world_size, dtype, device)
        q = problem.q.cpu()
        check = Float64Check(q, k, v, problem.key_ranges())
        shards = zip(problem.k_shards, problem.v_shards, strict=True)
        states = [
            attention(q, k_shard.cpu(), v_shard.cpu(), problem.key_ranges(rank))
            for rank, (k_shard, v_shard) in enumerate(shards)
        ]
        o_parts, lse_parts = (torch.stack(parts) for parts in zip(*states, strict=True))

        def judge(o: Tensor, lse: Tensor | None) -> Accuracy:
            # Plain PyTorch in 16 bits can be so wrong that its bound would accept anything.
            accuracy = check.accuracy(o, lse)
            return replace(accuracy, o_bound=min(accuracy.o_bound, 1 / 16))

        parts = o_parts, lse_parts
        return _line(case, lambda: decode(problem), lse_base, judge, parts, check.o_true)

    return Report(tuple(map(line, DECODE_CASES)))


def _line(
    case: MergeCase | DecodeCase,
    run: Callable[[], State],
    lse_base: float,
    judge: Callable[[Tensor, Tensor | None], Accuracy],
    parts: tuple[Tensor, Tensor],
    o_true: Tensor,
) -> Line:
    """Runs one case. `parts` are the states that are merged, with natural logarithms."""
    try:
        o, lse = run()
    except NotImplementedError as error:
        return Line(case.name, None, f"NotImplementedError: {error}", "")
    except Exception as error:
        return Line(case.name, False, f"{type(error).__name__}: {error}", "")
    for name, x, shape in (("o", o, o_true.shape), ("lse", lse, o_true.shape[:-1])):
        if x is not None and x.shape != shape:
            measured = f"{name} has the shape {list(x.shape)}, expected {list(shape)}"
            return Line(case.name, False, measured, "")
    o = o.cpu()
    lse = None if lse is None else math.log(lse_base) * lse.cpu().double()
    accuracy = judge(o, lse)
    measured = f"o {accuracy.o_error:.1e} (bound {accuracy.o_bound:.1e}), lse " + (
        "not given" if lse is None else f"{accuracy.lse_error:.1e} (bound {accuracy.lse_bound:.1e})"
    )
    if accuracy.right:
        return Line(case.name, True, measured, "")
    o_parts, lse_parts = parts
    known, meaning = ~lse_parts.isnan().any(0), case.meaning
    if not accuracy.o_error <= accuracy.o_bound:
        for factor, sentence in (
            (math.log(2), "natural logarithms look merged as if their base were 2"),
            (1 / math.log(2), "logarithms to base 2 look merged as if they were natural"),
        ):
            o_mistaken, _ = merge_states(o_parts, factor * lse_parts)
            if row_error(o[known], o_mistaken[known]) <= accuracy.o_bound:
                meaning = sentence
                break
        is_close = o.dtype != torch.bfloat16 and accuracy.o_error <= torch.finfo(torch.bfloat16).eps
        if is_close and torch.equal(o[known], o[known].bfloat16().to(o)):
            meaning = "o is rounded to bfloat16: merge in float32, and round once at the end"
    elif lse is not None and judge(o, math.log(2) * lse).right:
        meaning = "lse looks like a logarithm to base 2: multiply it by log(2)"
    return Line(case.name, False, measured, meaning)
