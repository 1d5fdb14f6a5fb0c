# SPDX-License-Identifier: BSD-3-Clause
"""Bytes that a rank keeps and sends, and seconds that it takes, as docs/parallelism.md says.

Times are those of bandwidths, of arithmetic at the rate that is given, and of rounds of messages.
Nothing overlaps and nobody waits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .machines import Hosts
from .models import BF16, Model

# Forms. T is tensor_parallel_size: 1, or as large as the heads of keys and values allow.
WHOLE, PROMPTS = "weights whole", "weights whole, prompts split"
SPLIT, SPLIT_BY_HEADS = "weights split, T = 1", "weights split, largest T"
FORMS = (WHOLE, PROMPTS, SPLIT, SPLIT_BY_HEADS)
# Others' forms: keys and values travel past queries that are dealt to the ranks; weights are split
# by heads and the cache is not split by slots; ranks have a model and sequences of their own.
RING, TENSOR, DATA = "ring", "tensor parallel", "data parallel"
IS_SPLIT = {form: form in (SPLIT, SPLIT_BY_HEADS, TENSOR) for form in (*FORMS, RING, TENSOR, DATA)}
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
    """Why `p` ranks cannot take this form, or nothing: heads are dealt whole, and as many."""
    divides = p % model.kv_heads == 0 or model.kv_heads % p == 0
    if form == TENSOR and (model.heads % p or not divides):
        return "uneven"
    return ""


# What a rank of `p` keeps.


def layers_weights(model: Model, form: str, p: int) -> float:
    """Number of weights of a rank in its layers: a context group has copies of q, k and v."""
    if not IS_SPLIT[form]:
        return model.layers * model.layer_weights
    size = tensor_parallel_size(model, form, p)
    q = model.q_weights / (p if form == TENSOR else size)
    others = (model.layer_weights - model.q_weights - model.kv_weights) / p
    return model.layers * (q + model.kv_weights / size + others)


def weights_bytes(model: Model, form: str, p: int) -> float:
    ends = model.end_weights * (1 if model.tied else 2) / (p if IS_SPLIT[form] else 1)
    return BF16 * (layers_weights(model, form, p) + ends)


def cache_bytes(model: Model, form: str, p: int, work: Work) -> float:
    """Keys and values of a rank."""
    contexts: float = work.sequences * work.context
    if form == DATA:
        contexts = _own_sequences(p, work) * work.context
    elif form == TENSOR:
        contexts /= tensor_parallel_size(model, form, p)
    else:
        contexts /= p
    return model.layers * model.kv_bytes * contexts


def exchange_bytes(model: Model, form: str, p: int, work: Work) -> float:
    """What is sent and what comes at once, at most: in a chunk of a prompt, as a rule."""
    if p == 1 or form == DATA:
        return 0.0
    tokens = max(work.sequences, min(work.chunk, work.context))
    size, activations = tensor_parallel_size(model, form, p), model.hidden * BF16
    if form == RING:  # a shard that comes, and one that is passed on
        return 2 * work.sequences * work.context * model.kv_bytes / p
    if form == TENSOR:
        return 2 * tokens * activations
    if form == PROMPTS:
        return 2 * min(tokens * (model.query_bytes + model.state_bytes), _PIECE)
    states = model.state_bytes / size if p > size else 0.0
    return 2 * tokens * max(states, activations if IS_SPLIT[form] else 0.0)


def held_bytes(model: Model, form: str, p: int, work: Work) -> float:
    """Weights and key/value cache of a rank."""
    return weights_bytes(model, form, p) + cache_bytes(model, form, p, work)


def _own_sequences(p: int, work: Work) -> int:
    """Of the rank that has most, where each has sequences of its own."""
    return -(-work.sequences // p)


# Bytes that a rank of `p` sends for a layer.


def to_all(num_bytes: float, p: int) -> float:
    """In one round: its own part to every other rank."""
    return (p - 1) * num_bytes


def to_owners(num_bytes: float, p: int) -> float:
    """A slice of what it has to each other rank."""
    return (p - 1) * num_bytes / p


def sum_bytes(num_bytes: float, p: int) -> float:
    """An all_reduce: in one round up to 64 KiB, else in two phases."""
    return to_all(num_bytes, p) if num_bytes <= 64 << 10 else 2 * to_owners(num_bytes, p)


def merge_bytes(model: Model, form: str, p: int, tokens: int) -> float:
    """The merge of the heads that the rank goes on with, where weights are split."""
    size = tensor_parallel_size(model, form, p)
    return 0.0 if form == TENSOR else to_owners(tokens * model.state_bytes / size, p // size)


def token_layer_bytes(model: Model, form: str, p: int, work: Work) -> float:
    """For a new token: a merge and two sums, or the merge of all heads; or keys and values."""
    if IS_SPLIT[form]:
        sums = 2 * sum_bytes(work.sequences * model.hidden * BF16, p)
        return merge_bytes(model, form, p, work.sequences) + sums
    if form == RING:
        return to_owners(work.sequences * work.context * model.kv_bytes, p)
    return 0.0 if form == DATA else to_all(work.sequences * model.state_bytes, p)


def token_ends_bytes(model: Model, form: str, p: int, work: Work) -> float:
    """For a new token, once: the sum after the embedding, and the logits."""
    if not IS_SPLIT[form]:
        return 0.0
    logits = to_all(work.sequences * model.vocab * BF16 / p, p)
    return sum_bytes(work.sequences * model.hidden * BF16, p) + logits


def chunk_layer_bytes(model: Model, form: str, p: int, begin: int, tokens: int) -> float:
    """For a chunk of a prompt behind `begin` tokens."""
    states = tokens * model.state_bytes
    if IS_SPLIT[form]:
        return merge_bytes(model, form, p, tokens) + 2 * sum_bytes(tokens * model.hidden * BF16, p)
    if form == RING:
        return to_owners((begin + tokens) * model.kv_bytes, p)
    if form == PROMPTS:
        # The cheaper way: all queries and the states of them, or all keys and values.
        pass_queries = to_owners(tokens * model.query_bytes + states, p)
        return min(pass_queries, to_owners((begin + tokens) * model.kv_bytes, p))
    return 0.0 if form == DATA else 2 * to_owners(states, p)


# Seconds.


def token_seconds(model: Model, hosts: Hosts, form: str, p: int, work: Work) -> Seconds:
    """Of a new token of every sequence behind `work.context` tokens."""
    is_split, layers = IS_SPLIT[form], model.layers
    # Of an embedding that is not lm_head one row is read.
    unread = 0.0 if model.tied else BF16 * model.end_weights / (p if is_split else 1)
    sequences = _own_sequences(p, work) if form == DATA else work.sequences
    read = held_bytes(model, form, p, work) - unread
    weights = (weights_bytes(model, form, p) - unread) / BF16
    pairs = sequences * work.context * model.heads * model.head_dim / (1 if form == DATA else p)
    operations = 2 * sequences * weights + 4 * layers * pairs
    merges = int(form != TENSOR and tensor_parallel_size(model, form, p) < p)
    rounds = {DATA: 0, RING: p - 1}.get(form, merges + 2 * is_split)
    sent = layers * token_layer_bytes(model, form, p, work)
    sent += token_ends_bytes(model, form, p, work)
    return Seconds(
        max(read / hosts.machine.memory_bandwidth, operations / hosts.machine.arithmetic),
        _exchange_seconds(hosts, p, layers * rounds + 2 * is_split, sent),
    )


def prefill_seconds(model: Model, hosts: Hosts, form: str, p: int, work: Work) -> Seconds:
    """Of the prompts of all sequences, of `work.context` tokens each, in chunks."""
    context, layers = work.context, model.layers
    prompts = _own_sequences(p, work) if form == DATA else work.sequences
    weights = layers_weights(model, form, p) / (p if form in (PROMPTS, RING) else 1)
    pairs = context * context / 2  # a query and a key before it
    attention = 4 * layers * model.heads * model.head_dim * pairs / (1 if form == DATA else p)
    # A ring deals the whole prompt, and keys and values go round once.
    chunk = context if form == RING else work.chunk
    chunks = [(begin, min(chunk, context - begin)) for begin in range(0, context, chunk)]
    sent = sum(chunk_layer_bytes(model, form, p, *each) for each in chunks)
    # At most: a sum has two phases.
    rounds = {DATA: 0, RING: p - 1}.get(form, 5 if IS_SPLIT[form] else 2)
    return Seconds(
        prompts * (2 * weights * context + attention) / hosts.machine.arithmetic,
        prompts * _exchange_seconds(hosts, p, layers * rounds * len(chunks), layers * sent),
    )


def _exchange_seconds(hosts: Hosts, p: int, rounds: int, sent: float) -> float:
    if p == 1:
        return 0.0
    return rounds * hosts.link.round_seconds + sent / hosts.link.bandwidth
