# SPDX-License-Identifier: BSD-3-Clause
"""Calls of append_kv that are refused."""

import pytest
import torch

from test_append_kv import INT8, make_call, run_and_check
from tree_attention import append_kv

ERRORS = {
    "k axes": (
        lambda c: {"k": c.k[0]},
        "k must have shape [batch, num_heads_kv, tokens, head_dim], got [2, 3, 64]",
    ),
    "k dtype": (
        lambda c: {"k": c.k.double()},
        "k must be float32, bfloat16 or float16, got float64",
    ),
    "v dtype": (lambda c: {"v": c.v.float()}, "v must be bfloat16, got float32"),
    "v tokens": (
        lambda c: {"v": c.v[:, :, :2]},
        "v must have k's first three axes [2, 2, 3], got [2, 2, 2]",
    ),
    "cache dtype": (
        lambda c: {"k_cache": c.k_cache.to(torch.uint8)},
        "k_cache must be float32, bfloat16 or float16, got uint8",
    ),
    "other cache's dtype": (
        lambda c: {"v_cache": c.v_cache.to(torch.bfloat16)},
        "v_cache must be int8, got bfloat16",
    ),
    "cache axes": (
        lambda c: {"v_cache": c.v_cache[0]},
        "v_cache must have shape [batch, num_heads_kv, capacity, head_dim], got [2, 20, 64]",
    ),
    "cache batch": (
        lambda c: {"k_cache": c.k_cache[:1], "v_cache": c.v_cache[:1]},
        "k_cache must have k's batch 2, got 1",
    ),
    "cache heads": (
        lambda c: {"k_cache": c.k_cache[:, :1], "v_cache": c.v_cache[:, :1]},
        "k_cache must have k's num_heads_kv 2, got 1",
    ),
    "cache capacity": (
        lambda c: {"v_cache": c.v_cache[:, :, :9]},
        "v_cache must have k_cache's first three axes [2, 2, 20], got [2, 2, 9]",
    ),
    "cache head_dim": (
        lambda c: {"v_cache": c.v_cache[..., :9]},
        "v_cache must have v's head_dim 64, got 9",
    ),
    "slots dtype": (
        lambda c: {"slots": c.slots.int()},
        "slot_mapping must be int64, got int32",
    ),
    "slots shape": (
        lambda c: {"slots": c.slots[:, :2]},
        "slot_mapping must have shape [batch, tokens] = [2, 3], got [2, 2]",
    ),
    "slot beyond the capacity": (
        lambda c: {"slots": torch.tensor([[0, 1, 2], [3, 20, 4]])},
        "slot_mapping must be in [-1, 20), got 20 for token 1 of sequence 1",
    ),
    "slot below -1": (
        lambda c: {"slots": torch.tensor([[0, 1, -2], [3, 2, 4]])},
        "slot_mapping must be in [-1, 20), got -2 for token 2 of sequence 0",
    ),
    "no k_scale": (lambda c: {"k_scale": None}, "k_scale must be given for int8 keys, got None"),
    "scales of other caches": (
        lambda c: {"k_cache": c.k_cache.half(), "v_cache": c.v_cache.half()},
        "k_scale must be None for float16 keys, got a tensor of shape [2, 2, 20]",
    ),
    "scale shape": (
        lambda c: {"v_scale": torch.ones(2, 2, 3)},
        "v_scale must have shape [batch, num_heads_kv, capacity] = [2, 2, 20], got [2, 2, 3]",
    ),
    "scale dtype": (
        lambda c: {"v_scale": torch.ones(2, 2, 20).half()},
        "v_scale must be float32, got float16",
    ),
    "cache strides": (
        lambda c: {"k_cache": c.k_cache.mT.contiguous().mT},
        "k_cache must have a contiguous last axis, got stride 20",
    ),
    "device": (
        lambda c: {"slots": c.slots.to("meta")},
        "slot_mapping must be on k's device cpu, got meta",
    ),
    "v_cache without v": (
        lambda c: {"v": None},
        "v and v_cache must be given together, got v_cache alone",
    ),
    "v without v_cache": (
        lambda c: {"v_cache": None},
        "v and v_cache must be given together, got v alone",
    ),
    "v_scale without v": (
        lambda c: {"v": None, "v_cache": None},
        "v_scale must be None without v, got a tensor of shape [2, 2, 20]",
    ),
    "no k_scale, no v": (
        lambda c: {"v": None, "v_cache": None, "k_scale": None, "v_scale": None},
        "k_scale must be given for int8 keys, got None",
    ),
    "overlapping caches": (
        lambda c: {"v_cache": c.k_cache}, "v_cache must not share memory with k_cache"
    ),
    "expanded cache": (
        lambda c: {"k_cache": c.k_cache[:1].expand(2, -1, -1, -1)},
        "k_cache must not have two elements at one place in memory",
    ),
    "overlapping scales": (
        lambda c: {"v_scale": c.options["k_scale"]}, "v_scale must not share memory with k_scale"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    """Each names operator, argument, requirement and value, and nothing was written."""
    call = make_call(layout="BHSD")
    change, message = ERRORS[name]
    changed = change(call)
    k_cache, v_cache = call.k_cache, call.v_cache
    options = {n: changed.pop(n) for n in ("k_scale", "v_scale") if n in changed}
    for field, value in changed.items():
        setattr(call, field, value)
    with pytest.raises(ValueError) as error:
        call.run(**options)
    assert f"append_kv: {message}" in str(error.value).splitlines()[0]
    assert (k_cache == 5).all() and (v_cache == 5).all()
    assert all((call.options[n] == 7).all() for n in ("k_scale", "v_scale"))


@pytest.mark.parametrize("page_size", [0, 4], ids=["rows", "pages"])
def test_of_tokens_with_one_slot_the_last_is_kept(page_size):
    """Also where threads share the tokens, of which several write to one row."""
    tokens, capacity, head_dim = 600, 12, 64
    shape = (3, 2, 4, head_dim) if page_size else (1, 2, capacity, head_dim)
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        slots = torch.randint(-1, 4, (1, tokens), generator=generator)
        k = torch.arange(tokens, dtype=torch.float32)[None, None, :, None]
        k = k.expand(1, 2, tokens, head_dim).contiguous()
        k_cache, v_cache = torch.full((2, *shape), -1.0)
        append_kv(k, k + 0.5, k_cache, v_cache, slots, paged=page_size > 0)
        found = k_cache.transpose(0, 1).reshape(2, capacity, head_dim)
        for slot in range(capacity):
            last = (slots[0] == slot).nonzero()[:, 0].tolist()
            assert (found[:, slot] == (last[-1] if last else -1)).all()
        assert torch.equal(v_cache, torch.where(k_cache < 0, k_cache, k_cache + 0.5))


def test_gradients_are_refused():
    call = make_call()
    call.k.requires_grad_()
    with pytest.raises(RuntimeError, match="append_kv: k must not require a gradient"):
        call.run()
    with torch.no_grad():
        call.run()


def test_what_is_no_tensor():
    call = make_call()
    call.slots = [0]
    with pytest.raises(TypeError, match=r"append_kv: slot_mapping must be a tensor, got \[0\]"):
        call.run()


SLOTS_OUT_OF_RANGE = [-2, 20, 2**31 + 3, 2**40, 2**63 - 1, -(2**63)]


@pytest.mark.parametrize("page_size", [0, 4], ids=["rows", "pages"])
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, INT8])
def test_cuda_drops_slots_out_of_range(kv_dtype, page_size, cuda_kernels):
    call = make_call(batch=1, tokens=7, kv_dtype=kv_dtype, page_size=page_size)
    capacity = call.k_cache.shape[0] * page_size or call.k_cache.shape[2]
    bad = [capacity if slot == 20 else slot for slot in SLOTS_OUT_OF_RANGE]
    call.slots = torch.tensor([[-1, -1, -1, capacity - 1, -1, -1, -1]])
    run_and_check(call, cuda_kernels, torch.tensor([[*bad[:3], capacity - 1, *bad[3:]]]))


@pytest.mark.parametrize("slot", SLOTS_OUT_OF_RANGE)
def test_cuda_checks_slots_in_the_debug_mode(slot, cuda_kernels, monkeypatch):
    """The words of the CPU, of slots with any strides."""
    monkeypatch.setenv("TREE_ATTENTION_CHECK_PAGES", "1")
    call = make_call().to(cuda_kernels)
    slots = torch.tensor([[0, 1, 2], [3, slot, 4]], device=cuda_kernels)
    for call.slots in (slots, slots.mT.contiguous().mT):
        with pytest.raises(ValueError) as error:
            call.run()
        assert str(error.value).splitlines()[0] == (
            f"append_kv: slot_mapping must be in [-1, 20), got {slot} for token 1 of sequence 1"
        )
        assert (call.k_cache == 5).all() and (call.v_cache == 5).all()
    call.slots = torch.tensor([[0, -1, 19]], device=cuda_kernels).expand(2, -1)
    call.run()
    assert (call.k_cache != 5).any()


def test_cuda_checks_no_slots_of_no_tokens(cuda_kernels, monkeypatch):
    """They have no memory of which the check could make a tensor."""
    monkeypatch.setenv("TREE_ATTENTION_CHECK_PAGES", "1")
    call = make_call(tokens=0).to(cuda_kernels)
    assert call.slots.numel() == 0
    call.run()
    assert (call.k_cache == 5).all() and (call.v_cache == 5).all()
