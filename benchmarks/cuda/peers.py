# SPDX-License-Identifier: BSD-3-Clause
"""The implementations that a case is timed with: ours, its ablations, PyTorch's.

Each is given the same problem at its best: no mask where it needs none, slices where the host may
know the lengths. What cannot do a case says why.
"""

import warnings
from collections.abc import Mapping
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tree_attention import lean_decode

from . import ablations
from .cases import LATENCY, MLA_16, ONE_HEAD, OURS, CudaCase
from .inputs import Inputs
from .libraries import Maker, Unavailable, require_16_bits, require_plain
from .timing import Call, check_device, reason

FLASH = "torch flash"
VARLEN = "torch flash varlen"  # lengths on the device, as ours
EACH = "torch flash per sequence"  # lengths on the host
CUDNN = "cuDNN"
FLEX = "FlexDecoding"
UNSPLIT, EQUAL_SPLIT, SPIN = "unsplit", "equal splits", "spin-wait"
# Names of the published schedules by their operators.
ABLATIONS = {"equal_splits": EQUAL_SPLIT, "waiting_fixup": SPIN}
# Numbers of workers that some rows try: 34 are a quarter of one block on each of an H200's
# multiprocessors, 264 two on each, 256 what plan.cu takes for one output of many rows.
WORKERS = {f"{n} workers": n for n in (34, 68, 132, 136, 256, 264)}
WORKERS_TRIED = (LATENCY, ONE_HEAD, MLA_16)
# Our own kernel with another schedule is no peer.
SCHEDULES = (UNSPLIT, *ABLATIONS.values(), *WORKERS)
FLASH_OP = torch.ops.aten._scaled_dot_product_flash_attention.default
VARLEN_OP = torch.ops.aten._flash_attention_forward.default
MOST_ROWS = 64  # that every kernel takes as one output


def implementations(
    case: CudaCase, inputs: Inputs, libraries: Mapping[str, Maker]
) -> tuple[dict[str, Call], dict[str, str]]:
    """Calls by name, and the reasons of those that are not available."""
    makers: dict[str, Maker] = {
        OURS: ours,
        FLASH: flash,
        VARLEN: flash_varlen,
        EACH: flash_each,
        CUDNN: cudnn,
        FLEX: flex,
        UNSPLIT: unsplit,
        **libraries,
    }
    for op, name in ABLATIONS.items():
        makers[name] = partial(ablation, op)
    if case in WORKERS_TRIED:
        for name, num_workers in WORKERS.items():
            makers[name] = partial(ours, num_workers=num_workers)
    calls, unavailable = {}, {}
    for name, make in makers.items():
        try:
            calls[name] = make(case, inputs)
        except Unavailable as why:
            unavailable[name] = str(why)
        except Exception as error:
            unavailable[name] = reason(error)
        check_device(name)
    return calls, unavailable


def ours(case: CudaCase, inputs: Inputs, num_workers: int = 0) -> Call:
    ranges = None if inputs.all_keys else inputs.key_ranges
    q, sets = inputs.q, inputs.sets
    options = [inputs.options(i) for i in range(len(sets))]
    return lambda i: lean_decode(
        q, sets[i].k, sets[i].v, ranges, num_workers=num_workers, **options[i]
    )


def unsplit(case: CudaCase, inputs: Inputs) -> Call:
    """FlashAttention-2's decomposition: a block for each output, as equal ones cut the line."""
    if case.ragged:
        raise Unavailable("for one length of all sequences")
    if case.heads[0] // case.heads[1] * case.seqlen_q > MOST_ROWS:
        raise Unavailable(f"for up to {MOST_ROWS} packed rows")
    return ours(case, inputs, num_workers=case.batch * case.heads[1])


def ablation(name: str, case: CudaCase, inputs: Inputs) -> Call:
    require_plain(case)
    if not ablations.load():
        raise Unavailable("not built: python -m benchmarks.cuda.ablations")
    op = getattr(torch.ops.tree_attention_ablations, name)
    ranges = None if inputs.all_keys else inputs.key_ranges
    q, sets, table = inputs.q, inputs.sets, inputs.page_table
    return lambda i: op(q, sets[i].k, sets[i].v, ranges, page_table=table)


def flash(case: CudaCase, inputs: Inputs) -> Call:
    """Keys sliced to the one length that all sequences have."""
    require_16_bits(case)
    slices = _slices(case, inputs)
    # The operator itself aligns the last query with the last key.
    q, causal = inputs.q, case.seqlen_q > 1
    return lambda i: FLASH_OP(q, *slices[i], 0.0, causal)[0]


def flash_each(case: CudaCase, inputs: Inputs) -> Call:
    """A call for each sequence of a ragged batch, with slices of its length."""
    require_16_bits(case)
    if not case.ragged or case.page_size or case.window:
        raise Unavailable("for ragged batches only")
    q, causal = inputs.q.split(1), case.seqlen_q > 1
    sets = [
        [(kv.k[b : b + 1, :, :n], kv.v[b : b + 1, :, :n]) for b, n in enumerate(case.lengths)]
        for kv in inputs.sets
    ]
    return lambda i: torch.cat(
        [FLASH_OP(q_b, k, v, 0.0, causal)[0] for q_b, (k, v) in zip(q, sets[i], strict=True)]
    )


def flash_varlen(case: CudaCase, inputs: Inputs) -> Call:
    """The lengths in a tensor; the number of splits comes from the capacity."""
    require_16_bits(case)
    if not case.lengths_on_device or case.window:
        raise Unavailable("for lengths on the device only")
    arguments = {argument.name for argument in VARLEN_OP._schema.arguments}
    lengths: dict[str, Tensor] = {}
    sizes = [case.slots] * case.batch
    if case.layout == "packed":
        sizes = list(case.lengths)
    elif "seqused_k" not in arguments:
        raise Unavailable(f"torch {torch.__version__} takes no lengths beside the capacity")
    else:
        lengths["seqused_k"] = inputs.lengths
    if case.page_size:
        if "block_table" not in arguments:
            raise Unavailable(f"torch {torch.__version__} takes no pages")
        if case.page_size % 256:
            raise Unavailable("pages of 256 slots only")
        assert inputs.page_table is not None
        lengths["block_table"] = inputs.page_table
    sets = [
        (kv.k_memory, kv.v_memory)
        if case.page_size or case.layout == "packed"
        else (kv.k_memory.flatten(0, 1), kv.v_memory.flatten(0, 1))
        for kv in inputs.sets
    ]
    starts = list(accumulate(sizes, initial=0))
    key_starts = torch.tensor(starts, dtype=torch.int32, device=inputs.device)
    query_starts = case.seqlen_q * torch.arange(
        case.batch + 1, dtype=torch.int32, device=inputs.device
    )
    q = inputs.q.transpose(1, 2).flatten(0, 1)

    def run(i: int) -> Tensor:
        o: Tensor = VARLEN_OP(
            q,
            *sets[i],
            query_starts,
            key_starts,
            case.seqlen_q,
            case.slots,
            0.0,
            case.seqlen_q > 1,
            False,
            **lengths,
        )[0]
        return o.unflatten(0, (case.batch, case.seqlen_q)).transpose(1, 2)

    return run


def cudnn(case: CudaCase, inputs: Inputs, backend: SDPBackend = SDPBackend.CUDNN_ATTENTION) -> Call:
    """Keys sliced to the one length that all sequences have, and a mask where queries are causal:
    `is_causal` would align the first query with the first key."""
    require_16_bits(case)
    slices = _slices(case, inputs)
    q, mask = inputs.q, None
    if case.seqlen_q > 1:
        keys = torch.arange(case.lengths[0], device=inputs.device)
        mask = (keys < inputs.key_ranges[:1, None, :, 1:]).expand(case.batch, 1, -1, -1)

    def run(i: int) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, *slices[i], attn_mask=mask, enable_gqa=True)

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            run(0)
        except RuntimeError as error:
            # The reasons are warnings: one heading for each backend and what is wrong with it.
            why = [str(w.message).split(" (Triggered")[0] for w in said]
            why = [text for text in why if "cudnn" in text.lower() or "not" in text.lower()]
            raise Unavailable("; ".join([*why, str(error).splitlines()[0]])[:160]) from error
    return run


def flex(case: CudaCase, inputs: Inputs) -> Call:
    if not case.flex:
        raise Unavailable("not compiled for this row")
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

    mask = None
    if not inputs.all_keys:
        begins, ends = inputs.key_ranges.unbind(-1)

        def seen(b: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key >= begins[b, query]) & (key < ends[b, query])

        mask = create_block_mask(
            seen, case.batch, None, case.seqlen_q, case.slots, device=inputs.device
        )
    torch.compiler.reset()
    compiled: Any = torch.compile(flex_attention, fullgraph=True, dynamic=False)
    q, sets, aux = inputs.q, inputs.sets, AuxRequest(lse=True)

    def run(i: int) -> Tensor:
        k, v = sets[i].k, sets[i].v
        o: Tensor = compiled(q, k, v, block_mask=mask, enable_gqa=True, return_aux=aux)[0]
        return o

    return run


def _slices(case: CudaCase, inputs: Inputs) -> list[tuple[Tensor, Tensor]]:
    if case.ragged or case.page_size:
        raise Unavailable("one length for all and no pages")
    if case.window and case.seqlen_q > 1:
        raise Unavailable("no windows of several queries")
    keys = slice(case.first_key(case.lengths[0]), case.lengths[0])
    return [(kv.k[:, :, keys], kv.v[:, :, keys]) for kv in inputs.sets]
