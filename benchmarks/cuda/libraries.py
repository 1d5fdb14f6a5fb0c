# SPDX-License-Identifier: BSD-3-Clause
"""Kernels of other libraries: FlashInfer where it is installed, and FlashAttention-3 and FlashMLA
of vLLM, from shared libraries that `--peers` names. What their engines compute once a step for all
layers (a plan, a schedule) is made before they are timed; lean_decode has nothing of the kind."""

import importlib
import importlib.util
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .cases import CudaCase
from .inputs import Inputs, KeyValues
from .timing import Call

FLASHINFER, FLASH_3, FLASH_MLA = "FlashInfer", "FlashAttention-3", "FlashMLA"
Maker = Callable[[CudaCase, Inputs], Call]
PLANNED_BYTES = 256 << 20  # of FlashInfer's workspace
MLA_PAGE = 64  # the one page size of FlashMLA


class Unavailable(Exception):
    """Why an implementation is not timed for a case."""


def load(paths: Sequence[Path]) -> dict[str, Maker]:
    """Load the libraries; return what makes the call of each peer, by the peer's name."""
    makers: dict[str, Maker] = {}
    if importlib.util.find_spec("flashinfer") is not None:
        makers[FLASHINFER] = flashinfer
    for path in paths:
        torch.ops.load_library(path)
        # These libraries name their operators' namespace as themselves.
        name = path.name.split(".")[0]
        operators = getattr(torch.ops, name)
        if hasattr(operators, "get_scheduler_metadata"):
            makers[FLASH_3] = partial(flash_3, operators)
        elif hasattr(operators, "dense_decode_fwd"):
            makers[FLASH_MLA] = partial(flash_mla, operators.dense_decode_fwd)
        else:
            raise ValueError(
                f"--peers: {path.name} must register {name}::get_scheduler_metadata "
                f"(FlashAttention-3) or {name}::dense_decode_fwd (FlashMLA), and it has neither"
            )
    return makers


def flashinfer(case: CudaCase, inputs: Inputs) -> Call:
    """Its decode wrapper with tensor cores, planned for the lengths, which the host knows."""
    wrappers: Any = importlib.import_module("flashinfer")
    require_16_bits(case)
    size = case.page_size or 16
    pages, table = _paged(case, inputs, size)
    counts = [math.ceil(length / size) for length in case.lengths]
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    lasts = [length - size * (n - 1) for length, n in zip(case.lengths, counts, strict=True)]
    wrapper = wrappers.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(PLANNED_BYTES, dtype=torch.uint8, device=inputs.device),
        kv_layout="HND",
        use_tensor_cores=True,
        backend="fa2",
    )
    wrapper.plan(
        starts,
        torch.cat([table[b, :n] for b, n in enumerate(counts)]),
        torch.tensor(lasts, dtype=torch.int32),
        *case.heads,
        case.head_dim,
        size,
        q_data_type=inputs.q.dtype,
        kv_data_type=inputs.q.dtype,
        window_left=case.window - 1 if case.window else -1,
        **({"q_len_per_req": case.seqlen_q} if case.seqlen_q > 1 else {}),
    )
    q = inputs.q.transpose(1, 2).flatten(0, 1)

    def run(i: int) -> Tensor:
        o: Tensor = wrapper.run(q, pages[i])
        return o.unflatten(0, (case.batch, case.seqlen_q)).transpose(1, 2)

    return run


def flash_3(operators: Any, case: CudaCase, inputs: Inputs) -> Call:
    """Lengths on the device, and its schedule made of them before. Of latents the columns that are
    values too go by q_v, as in vLLM (v1/attention/backends/mla/flashattn_mla.py)."""
    if not case.latent_dim:
        require_16_bits(case)
    head_dim = case.head_dim - case.latent_dim  # of q and k
    causal = case.seqlen_q > 1 and not case.window
    window = {
        "window_size_left": case.window - 1 if case.window else -1,
        "window_size_right": 0 if case.window else -1,
    }
    slots = case.page_size * case.num_pages if case.page_size else case.slots
    schedule = operators.get_scheduler_metadata(
        batch_size=case.batch,
        max_seqlen_q=case.seqlen_q,
        max_seqlen_k=slots,
        num_heads=case.heads[0],
        num_heads_k=case.heads[1],
        headdim=head_dim,
        headdim_v=case.latent_dim or head_dim,
        qkv_dtype=inputs.q.dtype,
        seqused_k=inputs.lengths,
        page_size=case.page_size or None,
        max_seqlen_k_new=0,
        is_causal=causal,
        has_softcap=False,
        num_splits=0,
        pack_gqa=None,
        sm_margin=0,
        **window,
        **dict.fromkeys(
            ("cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_k_new", "seqused_q", "leftpad_k")
        ),
    )
    options = {
        "seqused_k": inputs.lengths,
        "page_table": inputs.page_table,
        "softmax_scale": case.head_dim**-0.5,
        "is_causal": causal,
        "softcap": 0.0,
        "is_rotary_interleaved": True,
        "scheduler_metadata": schedule,
        "num_splits": 0,
        "sm_margin": 0,
        "cp_world_size": 1,
        "cp_rank": 0,
        **window,
    }
    # What is not said of what its schema asks for.
    absent = (
        *("k_new", "v_new", "out", "cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_k_new"),
        *("seqused_q", "max_seqlen_q", "max_seqlen_k", "kv_batch_idx", "leftpad_k", "rotary_cos"),
        *("rotary_sin", "seqlens_rotary", "q_descale", "k_descale", "v_descale", "pack_gqa"),
        *("s_aux", "cp_tot_seqused_k"),
    )
    options |= dict.fromkeys(absent)
    columns = case.latent_dim, head_dim
    q_v, q = (x.contiguous() for x in inputs.q.transpose(1, 2).split(columns, -1))
    options["q_v"] = q_v if case.latent_dim else None

    def run(i: int) -> Tensor:
        kv = inputs.sets[i]
        k = kv.k[..., case.latent_dim :].transpose(1, 2)
        o: Tensor = operators.fwd(q, k, kv.v.transpose(1, 2), **options)[0]
        return o.transpose(1, 2)

    return run


def flash_mla(operator: Any, case: CudaCase, inputs: Inputs) -> Call:
    """Latents in pages of 64, and its schedule of the lengths made by the first call."""
    if not case.latent_dim:
        raise Unavailable("latent attention only")
    if case.page_size not in (0, MLA_PAGE):
        raise Unavailable(f"pages of {MLA_PAGE} slots only")
    pages, table = _paged(case, inputs, MLA_PAGE)
    latents = [k.transpose(1, 2) for k, _ in pages]
    q = inputs.q.transpose(1, 2).contiguous()
    fixed = (case.latent_dim, inputs.lengths, table, case.head_dim**-0.5, case.seqlen_q > 1)
    schedule = operator(q, latents[0], *fixed, None, None, None)[2:4]

    def run(i: int) -> Tensor:
        o: Tensor = operator(q, latents[i], *fixed, *schedule, None)[0]
        return o.transpose(1, 2)

    return run


def require_plain(case: CudaCase) -> None:
    """Keys and values in q's dtype and of the same head_dim."""
    if case.kv_dtype:
        raise Unavailable("no keys and values of 8 bits")
    if case.latent_dim:
        raise Unavailable("no latent attention")


def require_16_bits(case: CudaCase) -> None:
    require_plain(case)
    if case.dtype == "fp32":
        raise Unavailable("16-bit only")


def _paged(case: CudaCase, inputs: Inputs, size: int) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """K and V of each set as `[pages, heads, size, dim]`, and the table of pages. What is not paged
    is cut into pages where it lies."""
    if case.page_size:
        assert inputs.page_table is not None
        return [(kv.k, kv.v) for kv in inputs.sets], inputs.page_table
    batch_stride, head_stride, stride, _ = inputs.sets[0].k.stride()
    if case.slots % size or batch_stride % (size * stride):
        raise Unavailable(f"sequences of whole pages of {size} slots only")
    # The longest sequence of a packed batch is the last one, so no page ends behind the memory.
    table = torch.arange(case.slots // size)[None] + torch.arange(case.batch)[:, None] * (
        batch_stride // (size * stride)
    )

    def cut(x: Tensor) -> Tensor:
        shape = (int(table.max()) + 1, x.size(1), size, x.size(3))
        return x.as_strided(shape, (size * stride, head_stride, stride, 1))

    def both(kv: KeyValues) -> tuple[Tensor, Tensor]:
        return cut(kv.k), cut(kv.v)

    return [both(kv) for kv in inputs.sets], table.int().to(inputs.device)
