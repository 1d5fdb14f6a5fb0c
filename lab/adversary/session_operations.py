# SPDX-License-Identifier: BSD-3-Clause
"""What a session does with its model: forward passes and generations, each right or refused."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from hf_models import OF_EXPERTS, make_model
from tree_attention import Communicator, hf
from tree_attention.hf import CACHE_NAME

from . import model as truth
from .cases import made_once
from .conversation import MAX_LENGTH, ROOM, Conversation
from .outcome import AMPLE, DOCUMENTED, attempt
from .session_models import CHOOSING, exact, whole
from .threads import run_threads

Operation = Callable[[Conversation, Random], str]
MOST_NEW_TOKENS = 7  # of a turn


def forward(session: Conversation, rng: Random) -> str:
    ids, mask = session.draw_tokens(rng, padded=True)
    if ids.shape[1] > MAX_LENGTH:
        session.empty()
        return "reset"
    found = session.feed(ids, mask, logits_to_keep=rng.choice([0, 1, 1])).logits
    session.check(found, ids, mask)
    session.keep(ids, mask)
    return truth.bits(found)


def compiled(session: Conversation, rng: Random) -> str:
    """A step of decoding in one graph."""
    # transformers loops over the values of a tensor in its own experts, which no graph can.
    loops = session.name in OF_EXPERTS and not session.is_split
    if not session.length or loops or session.name in CHOOSING:
        return forward(session, rng)
    ids = torch.cat([session.ids, torch.full((len(session.ids), 1), rng.randrange(3, 99))], 1)
    torch.compiler.reset()
    step = torch.compile(session.model.forward, fullgraph=True, backend="aot_eager")
    mask = torch.cat([session.mask, torch.ones_like(ids[:, -1:])], 1)
    positions = (mask.cumsum(1) - 1)[:, -1:]
    found = step(
        ids[:, -1:], attention_mask=mask, position_ids=positions, **{CACHE_NAME: session.cache}
    ).logits
    session.check(found, ids, mask)
    session.keep(ids, mask)
    return truth.bits(found)


def turn(session: Conversation, rng: Random, ids: Tensor, mask: Tensor, **options: Any) -> str:
    """A generation of several tokens into the cache of the session."""
    count = rng.choice([1, 2, MOST_NEW_TOKENS])
    outcome = attempt(
        session.model.generate,
        ids,
        attention_mask=mask,
        **{CACHE_NAME: session.cache},
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        **options,
    )
    if options and session.length and outcome.error is not None:
        # Candidates behind cached tokens may be refused, which leaves the cache as it was.
        outcome.refusal(("generate",), (ValueError, NotImplementedError))
        session.reached = max(session.reached, ids.shape[1] + count)
        session.keep(session.ids, session.mask)
        return type(outcome.error).__name__
    sequences = outcome.result()
    assert torch.equal(sequences[:, : ids.shape[1]], ids)
    assert sequences.shape[1] == ids.shape[1] + count
    mask = torch.cat([mask, mask.new_ones(len(mask), count)], 1)
    session.check_greedy(sequences, mask, count)
    session.keep(sequences[:, :-1], mask[:, :-1])  # nobody has read the last one
    return truth.bits(sequences)


def generate(session: Conversation, rng: Random) -> str:
    ids, mask = session.draw_tokens(rng, padded=True)
    if ids.shape[1] > MAX_LENGTH:
        session.empty()
    else:
        return turn(session, rng, ids, mask)
    return "reset"


@made_once
def _assistant() -> PreTrainedModel:
    """Often right and often wrong."""
    model = make_model("llama")
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.01 * torch.randn(weight.shape, generator=generator)
    model.generation_config.num_assistant_tokens = 3
    model.generation_config.num_assistant_tokens_schedule = "constant"
    model.generation_config.assistant_confidence_threshold = 0.0
    return model


def speculate(session: Conversation, rng: Random) -> str:
    """Candidates of a lookup or of an assistant, which transformers takes for one sequence."""
    if len(session.ids) > 1:
        session.empty(batch=1)
    ids, mask = session.draw_tokens(rng, padded=True)
    if ids.shape[1] > MAX_LENGTH:
        session.empty()
        return "reset"
    candidates = rng.choice([{"prompt_lookup_num_tokens": 2}, {"prompt_lookup_num_tokens": 9},
                             {"assistant_model": _assistant()}])  # fmt: skip
    return turn(session, rng, ids, mask, **candidates)


def generate_alone(session: Conversation, rng: Random) -> str:
    """With a cache that `generate` makes for itself."""
    ids, mask = session.draw_tokens(rng, padded=False)
    beams = rng.choice([1, 1, 2])
    if ids.shape[1] > MAX_LENGTH:
        return "not now"
    sequences = session.model.generate(
        ids, attention_mask=mask, max_new_tokens=4, min_new_tokens=4, do_sample=False,
        num_beams=beams,
    )  # fmt: skip
    if beams == 1:
        mask = torch.cat([mask, mask.new_ones(len(mask), 4)], 1)
        session.check_greedy(sequences, mask, 4)
    return truth.bits(sequences)


class _Interruption(Exception):
    """What a user's hook raises, or Ctrl-C."""


def interrupt(session: Conversation, rng: Random) -> str:
    """A forward pass that ends inside the model: `crop` brings back what was before it."""
    ids, mask = session.draw_tokens(rng, padded=True)
    if ids.shape[1] > MAX_LENGTH or not session.length:
        return "not now"

    def stop(*_: Any) -> None:
        raise _Interruption

    layer = session.model.model.layers[rng.randrange(2)]
    handle = layer.register_forward_pre_hook(stop)
    outcome = attempt(session.feed, ids, mask, logits_to_keep=1)
    handle.remove()
    assert isinstance(outcome.error, _Interruption), outcome
    session.reached = max(session.reached, ids.shape[1])
    count = rng.randint(0, 3)
    cropped = attempt(session.cache.crop, -count)
    if cropped.error is None:
        kept = max(0, session.length - count)
        session.keep(session.ids[:, :kept], session.mask[:, :kept])
        lengths = {layer.length for layer in session.cache.kv_layers}
        assert lengths == {kept}, f"after crop(-{count}) the layers hold {lengths}, not {kept}"
        if session.mask.any(1).all():
            return str(kept)
    else:
        assert session.forgets, "crop was refused"
        cropped.refusal(("crop",), (ValueError,))
    session.empty()
    return "reset"


def refuse(session: Conversation, rng: Random) -> str:
    """A wrong call says so on every rank, and changes nothing that the next one needs."""
    model, cached, length = session.model, session.cache, session.length
    batch, many = len(session.ids), torch.full((len(session.ids), ROOM + 1), 5)
    ids = many[:, :1]
    layer = cached.layers[0]
    seconds = rng.choice([0, -1, float("nan"), float("inf"), "5"])
    config = model.config
    calls: dict[str, Callable[[], Any]] = {
        "max_time": lambda: model.generate(ids, max_time=1.0),
        "paged": lambda: model.generate(ids, cache_implementation="paged"),
        "static": lambda: model.generate(ids, cache_implementation="static"),
        CACHE_NAME: lambda: model.generate(ids, **{CACHE_NAME: 3}),
        "output_attentions": lambda: model.generate(ids, output_attentions=True),
        "offload": layer.offload,
        "crop": lambda: cached.crop(3),
        "kv_dtype": lambda: hf.TreeCache(config, session.comm, kv_dtype="int4"),
        "load": lambda: hf.TreeCache.load(
            "/proc/no/such/folder", config, session.comm, timeout=AMPLE
        ),
        "reshard": lambda: cached.reshard(5),
        "timeout": lambda: hf.TreeCache(config, session.comm, timeout=seconds),
        "timeout of enable": lambda: hf.enable(whole("mistral"), timeout=seconds),
        "timeout of seed_ranks": lambda: hf.seed_ranks(cached.shard.comm, timeout=seconds),
    }
    if not length:
        calls["save"] = lambda: cached.save("/proc/no/such/folder")
    if cached.max_length is not None:
        calls["max_length"] = lambda: model.generate(many, **{CACHE_NAME: cached})
        calls["hold"] = lambda: model(many, **{CACHE_NAME: cached})
    if length and session.name not in ("deepseek", *CHOOSING):
        keys = torch.zeros(batch, config.num_key_value_heads, 1, config.head_dim)
        calls["sequences"] = lambda: layer.update(*[torch.cat([keys, keys[:1]])] * 2)
        if session.cache_options["kv_dtype"] is None:
            calls["dtype"] = lambda: layer.update(keys.bfloat16(), keys.bfloat16())
    if length:
        calls["new"] = lambda: model.generate(session.ids, **{CACHE_NAME: cached})
    name = rng.choice(list(calls))
    outcome = attempt(calls[name])
    if name == "max_time" and session.world_size == 1 and outcome.error is None:
        return "in a world of one there is one clock"
    kinds = (*DOCUMENTED, hf.WrongAttentionError, FileNotFoundError)
    try:
        outcome.refusal((name.split()[0], "TreeCache", "generate", "tree_attention"), kinds)
    except AssertionError as error:
        raise AssertionError(f"{name}: {error}") from error
    assert all(int(layer.get_seq_length()) == length for layer in cached.layers), name
    return f"{name}: {type(outcome.error).__name__}"


def without_cache(session: Conversation, rng: Random) -> str:
    """The whole sequence on every rank: right, or refused where it would be spread over none."""
    ids, mask = session.draw_tokens(rng, padded=False)
    if not bool(mask.all()) or session.cache_options["kv_dtype"]:
        return "not now"
    outcome = attempt(session.model, ids, attention_mask=mask, use_cache=rng.random() < 0.5)
    if outcome.error is not None:
        outcome.refusal(("forward", "TreeCache", "enable", "tree_attention"))
        return type(outcome.error).__name__
    session.check(outcome.value.logits, ids, mask)
    return truth.bits(outcome.value.logits)


def two_threads(session: Conversation, rng: Random) -> str:
    """Two turns of generation at once: each is right or refused, and so is every later turn."""
    prompts = [session.draw_tokens(rng, padded=False)[0] for _ in range(2)]
    if session.length:
        return "not now"
    size = session.world_size
    group = dist.new_group(range(size)) if size > 1 else None
    comm = Communicator(group, 3.0)

    # Before threads begin: weights are drawn from the process's generator.
    models = [hf.enable(make_model("llama"), comm, timeout=3.0) for _ in prompts]
    exact("llama")

    def body(ids: Tensor, model: PreTrainedModel) -> None:
        options = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
        with torch.no_grad():
            outcome = attempt(model.generate, ids, **options)
            if outcome.error is not None:
                outcome.refusal(("rank", "thread"))
                return
            mask = torch.ones_like(outcome.value)
            llama = Conversation("llama", size, model, comm, {}, {"kv_dtype": None},
                                 session.cache, ids, mask)  # fmt: skip
            llama.check_greedy(outcome.value, mask, 3)

    run_threads({f"turn {i}": lambda i=i: body(prompts[i], models[i]) for i in range(2)}, 4 * AMPLE)  # type: ignore[misc]
    if group is not None:
        dist.destroy_process_group(group)
    return "nothing mixed"
