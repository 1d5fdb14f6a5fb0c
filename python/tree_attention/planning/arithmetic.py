# SPDX-License-Identifier: BSD-3-Clause
"""Bytes that a rank keeps and sends, and seconds that it takes, as docs/parallelism.md says.

Times are those of bandwidths, of arithmetic at the rate that is given, and of rounds of messages.
Nothing overlaps and nobody waits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .machines import Hosts
from .models import BF16, Attention, Model

# Forms. T is tensor_parallel_size: 1, or as large as the heads of keys and values allow.
WHOLE, PROMPTS = "weights whole", "weights whole, prompts split"
SPLIT, SPLIT_BY_HEADS = "weights split, T = 1", "weights split, largest T"
FORMS = (WHOLE, PROMPTS, SPLIT, SPLIT_BY_HEADS)
# Others' forms: keys and values travel past queries that are dealt to the ranks; weights are split
# by heads and the cache is not split by slots; ranks have a model and sequences of their own.
RING, TENSOR, DATA = "ring", "tensor parallel", "data parallel"
IS_SPLIT = {form: form in (SPLIT, SPLIT_BY_HEADS, TENSOR) for form in (*FORMS, RING, TENSOR, DATA)}
REFUSED = "refused"  # by `hf`; the model says why
_PIECE = 32 << 20  # bytes of the states, or keys and values, of a split prompt at a time


@dataclass(frozen=True)
class Work:
    """What all ranks together have to do."""

    context: int  # tokens of a prompt, and in the cache when a token is timed
    sequences: int = 1  # that get a new token at once; their prompts come one after another
    chunk: int = 2048  # tokens of a prompt in a forward pass, as hf.enable has them


@dataclass(frozen=True)
class Seconds:
    """Where the time of a token or of a prompt goes."""

    local: float  # reading memory or arithmetic, whichever takes longer
    exchange: float

    @property
    def total(self) -> float:
        return self.local + self.exchange


def tensor_parallel_size(model: Model, form: str, p: int) -> int:
    return math.gcd(p, model.kv_heads) if form in (SPLIT_BY_HEADS, TENSOR) else 1


def obstacle(model: Model, form: str, p: int) -> str:
    """Why `p` ranks cannot take this form, in few words, or nothing."""
    if p == 1:
        return ""
    if form in (SPLIT, SPLIT_BY_HEADS) and model.not_split:
        return REFUSED
    if form in (PROMPTS, RING) and model.not_dealt:
        return REFUSED
    divides = p % model.kv_heads == 0 or model.kv_heads % p == 0
    # Heads are dealt whole, and as many to each.
    if form == TENSOR and (not divides or any(layers.heads % p for layers in model.attention)):
        return "uneven"
    return ""


# What a rank of `p` keeps.


def dense_weights(model: Model, form: str, p: int) -> float:
    """Number of weights of a rank in its layers but for experts: a context group has copies of q, k
    and v."""
    weights = model.weights
    if not IS_SPLIT[form]:
        return weights.dense
    size = tensor_parallel_size(model, form, p)
    # Others split what stays whole here: layers with a state and projections of latents by heads.
    q, whole = (p, p) if form == TENSOR else (size, 1)
    shared = weights.q / q + weights.kv / size + weights.split / p + weights.whole / whole
    return shared + weights.vectors


def experts_weights(model: Model, form: str, p: int) -> float:
    return model.weights.experts / (p if form == TENSOR else 1)


def weights_bytes(model: Model, form: str, p: int) -> float:
    weights = model.weights
    ends = (weights.head + weights.embedding) / (p if IS_SPLIT[form] else 1)
    experts = weights.expert_itemsize * experts_weights(model, form, p)
    return weights.itemsize * (dense_weights(model, form, p) + ends) + experts


def _sums(model: Model, form: str) -> int:
    """How often ranks add up activations in a forward pass, beside the embedding."""
    return 2 * model.layers if form == TENSOR else IS_SPLIT[form] * model.sums


def _slots(model: Model, form: str, p: int, work: Work) -> float:
    """The part of all sequences' slots, times those of heads, that a rank keeps."""
    if form == DATA:
        return _own_sequences(p, work)
    return work.sequences / (tensor_parallel_size(model, form, p) if form == TENSOR else p)


def cache_bytes(model: Model, form: str, p: int, work: Work) -> float:
    """What a rank keeps of tokens: keys and values, or latents, and states."""
    return _states_bytes(model, form, p, work) + _slots(model, form, p, work) * sum(
        layers.layers * layers.token_bytes(model.kv_dtype) * layers.kept(work.context)
        for layers in model.attention
    )


def _states_bytes(model: Model, form: str, p: int, work: Work) -> float:
    """All ranks have the same states; others split them as the weights of their layers."""
    sequences = _own_sequences(p, work) if form == DATA else work.sequences
    return sequences * model.states_bytes / (p if form == TENSOR else 1)


def exchange_bytes(model: Model, form: str, p: int, work: Work) -> float:
    """What is sent and what comes at once, at most: in a chunk of a prompt, as a rule."""
    if p == 1 or form == DATA:
        return 0.0
    tokens = max(work.sequences, min(_chunk(model, WHOLE, p, work), work.context))
    size, activations = tensor_parallel_size(model, form, p), model.hidden * BF16
    states = max(layers.prompt_state_bytes for layers in model.attention)
    if form == RING:  # a shard that comes, and one that is passed on
        shards = (x.token_bytes(model.kv_dtype) * x.kept(work.context) for x in model.attention)
        return 2 * work.sequences * max(shards) / p
    if form == TENSOR:
        return 2 * tokens * activations
    if form == PROMPTS:
        queries = max(layers.query_bytes for layers in model.attention)
        return 2 * min(tokens * (queries + states), _PIECE)
    merged = states / size if p > size else 0.0
    return 2 * tokens * max(merged, activations if IS_SPLIT[form] else 0.0)


def held_bytes(model: Model, form: str, p: int, work: Work) -> float:
    """Weights and key/value cache of a rank."""
    return weights_bytes(model, form, p) + cache_bytes(model, form, p, work)


def _own_sequences(p: int, work: Work) -> int:
    """Of the rank that has most, where each has sequences of its own."""
    return -(-work.sequences // p)


# Bytes that a rank of `p` sends.


def to_all(num_bytes: float, p: int) -> float:
    """In one round: its own part to every other rank."""
    return (p - 1) * num_bytes


def to_owners(num_bytes: float, p: int) -> float:
    """A slice of what it has to each other rank."""
    return (p - 1) * num_bytes / p


def sum_bytes(num_bytes: float, p: int) -> float:
    """An all_reduce: in one round up to 64 KiB, else in two phases."""
    return to_all(num_bytes, p) if num_bytes <= 64 << 10 else 2 * to_owners(num_bytes, p)


def merge_bytes(model: Model, form: str, p: int, states: float) -> float:
    """The merge of the heads that the rank goes on with, where weights are split."""
    size = tensor_parallel_size(model, form, p)
    return 0.0 if form == TENSOR else to_owners(states / size, p // size)


def token_bytes(model: Model, form: str, p: int, work: Work) -> float:
    """For a new token of every sequence: merges and sums, or merges of all heads; or all keys."""
    if form == DATA:
        return 0.0
    sent = 0.0
    for layers in model.attention:
        states = work.sequences * layers.state_bytes
        if IS_SPLIT[form]:
            sent += layers.layers * merge_bytes(model, form, p, states)
        elif form == RING:
            slots = work.sequences * layers.seen(work.context)
            sent += layers.layers * to_owners(slots * layers.token_bytes(model.kv_dtype), p)
        else:
            sent += layers.layers * to_all(states, p)
    if IS_SPLIT[form]:  # one sum more follows the embedding
        sent += (_sums(model, form) + 1) * sum_bytes(work.sequences * model.hidden * BF16, p)
        sent += to_all(work.sequences * model.vocab * BF16 / p, p)  # logits
    return sent


def chunk_bytes(model: Model, form: str, p: int, begin: int, tokens: int) -> float:
    """For a chunk of a prompt behind `begin` tokens."""
    if form == DATA:
        return 0.0
    sent = sum(
        layers.layers * _chunk_layer_bytes(model, layers, form, p, begin, tokens)
        for layers in model.attention
    )
    return sent + _sums(model, form) * sum_bytes(tokens * model.hidden * BF16, p)


def _chunk_layer_bytes(
    model: Model, layers: Attention, form: str, p: int, begin: int, tokens: int
) -> float:
    states = tokens * layers.prompt_state_bytes
    if IS_SPLIT[form]:
        return merge_bytes(model, form, p, states)
    pass_keys = to_owners((layers.seen(begin) + tokens) * layers.token_bytes(model.kv_dtype), p)
    if form == RING:
        return pass_keys
    if form == PROMPTS:
        # The cheaper way: all queries and the states of them, or all keys and values.
        return min(to_owners(tokens * layers.query_bytes + states, p), pass_keys)
    return 2 * to_owners(states, p)


# Seconds.


def token_seconds(model: Model, hosts: Hosts, form: str, p: int, work: Work) -> Seconds:
    """Of a new token of every sequence behind `work.context` tokens."""
    is_split, weights = IS_SPLIT[form], model.weights
    sequences = _own_sequences(p, work) if form == DATA else work.sequences
    dense = dense_weights(model, form, p) + weights.head / (p if is_split else 1)
    experts = experts_weights(model, form, p)
    read = weights.itemsize * dense
    read += 2 * _states_bytes(model, form, p, work)  # which are written, too
    read += weights.expert_itemsize * experts * weights.share_of_experts(sequences)
    operations = 2 * sequences * (dense + experts * weights.chosen / weights.num_experts)
    for layers in model.attention:
        seen = layers.layers * layers.seen(work.context)
        read += _slots(model, form, p, work) * seen * layers.token_bytes(model.kv_dtype)
        pairs = sequences * seen * layers.heads / (1 if form == DATA else p)
        operations += 2 * pairs * sum(layers.step)
    merges = int(form != TENSOR and tensor_parallel_size(model, form, p) < p)
    rounds = model.cached_layers * {DATA: 0, RING: p - 1}.get(form, merges)
    sums = is_split * (_sums(model, form) + 2)
    return Seconds(
        max(read / hosts.machine.memory_bandwidth, operations / hosts.machine.arithmetic),
        _exchange_seconds(hosts, p, rounds + sums, token_bytes(model, form, p, work)),
    )


def prefill_seconds(model: Model, hosts: Hosts, form: str, p: int, work: Work) -> Seconds:
    """Of the prompts of all sequences, of `work.context` tokens each, in chunks."""
    context, weights = work.context, model.weights
    prompts = _own_sequences(p, work) if form == DATA else work.sequences
    chunk = _chunk(model, form, p, work)
    chunks = [(begin, min(chunk, context - begin)) for begin in range(0, context, chunk)]
    experts = experts_weights(model, form, p) * weights.chosen / weights.num_experts
    matrices = (dense_weights(model, form, p) + experts) / (p if form in (PROMPTS, RING) else 1)
    operations = 2 * matrices * context
    for layers in model.attention:
        attention = 2 * layers.heads * (layers.key + layers.value) * layers.pairs(context)
        # Every chunk makes keys and values from the latents again, every rank those of its slots,
        # or of all where latents go round.
        expanded = sum(layers.seen(begin) + tokens for begin, tokens in chunks)
        expansion = layers.expansion * expanded * (p if form == RING else 1)
        operations += layers.layers * (attention + expansion) / (1 if form == DATA else p)
    sent = sum(chunk_bytes(model, form, p, *each) for each in chunks)
    # At most: a sum has two phases.
    merges = {DATA: 0, RING: p - 1}.get(form, 1 if IS_SPLIT[form] else 2)
    rounds = model.cached_layers * merges + 2 * _sums(model, form)
    return Seconds(
        prompts * operations / hosts.machine.arithmetic,
        prompts * _exchange_seconds(hosts, p, rounds * len(chunks), sent),
    )


def _chunk(model: Model, form: str, p: int, work: Work) -> int:
    """Tokens of a prompt in a forward pass of all ranks."""
    # A ring deals the whole prompt, and keys and values go round once.
    if form == RING or not model.may_be_chunked:
        return work.context
    return work.chunk * (p if form == PROMPTS else 1)


def _exchange_seconds(hosts: Hosts, p: int, rounds: int, sent: float) -> float:
    if p == 1:
        return 0.0
    return rounds * hosts.link.round_seconds + sent / hosts.link.bandwidth
