# SPDX-License-Identifier: BSD-3-Clause
"""Shapes of models as the arithmetic needs them, and some by name."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

BF16, FP32 = 2, 4  # bytes of a weight, an activation, a key; of a partial state
# Bytes of an element of a key or value, and bytes of the scale of each token and head.
KV_DTYPES = {"bf16": (BF16, 0), "int8": (1, FP32), "fp8": (1, FP32)}
# A cache of models in float32 is in that dtype too.
_KV_BYTES = {**KV_DTYPES, "float32": (FP32, 0)}
# Bytes of a weight in linear layers and experts; of int4, with a scale for 128 of them.
WEIGHT_DTYPES = {"bf16": BF16, "int8": 1, "int4": 0.5 + BF16 / 128}


@dataclass(frozen=True)
class Index:
    """An index that chooses keys; without heads, the layer takes the choice of one before."""

    topk: int  # number of keys
    heads: int = 0
    columns: int = 0  # of its key of a token, which has the model's dtype
    entries: int = 0  # of a choice that ranks exchange


@dataclass(frozen=True)
class Attention:
    """Layers that cache alike: keys and values, or the latents that these are made from.

    A new token attends to latents as if they were one head; a prompt to keys made from them.
    """

    layers: int
    heads: int
    kv_heads: int  # in the cache: 1 for latents
    key: int  # columns of a head of queries and keys
    value: int  # columns of a head of values
    window: int | None = None  # no query sees more tokens
    latent: tuple[int, int] | None = None  # kv_lora_rank, and columns of the key all heads share
    index: Index | None = None

    def seen(self, context: int) -> int:
        """Number of tokens that a new one sees. A cache keeps some more before the window."""
        return context if self.window is None else min(context, self.window)

    def attended(self, context: int) -> int:
        """Number of keys that a new token attends to: all that it sees, or the chosen ones."""
        seen = self.seen(context)
        return seen if self.index is None else min(seen, self.index.topk)

    def pairs(self, context: int) -> float:
        """Number of (query, key) pairs in the attention of a prompt."""
        attended = self.attended(context)
        return attended * context - attended * attended / 2

    def token_bytes(self, kv_dtype: str) -> int:
        """Bytes that a layer keeps of a token."""
        itemsize, scale = _KV_BYTES[kv_dtype]
        columns = sum(self.latent or (self.kv_heads * self.key, self.kv_heads * self.value))
        return columns * itemsize + 2 * self.kv_heads * scale + self.index_bytes

    @property
    def index_bytes(self) -> int:
        """Bytes of the index key that a layer keeps of a token; 0 in a layer without an index."""
        return 0 if self.index is None else BF16 * self.index.columns

    def chooses(self, context: int) -> bool:
        """True where the layer scores keys, as there are more than may be chosen."""
        return self.index is not None and self.index.heads > 0 and context > self.index.topk

    def scored(self, context: int) -> float:
        """Operations of the index for a query that sees `context` tokens."""
        if self.index is None or not self.chooses(context):
            return 0.0
        return 2.0 * self.index.heads * self.index.columns * context

    def choice_bytes(self, context: int) -> int:
        """Bytes of a query's choice, which ranks exchange: a score and a slot for each entry."""
        return 8 * self.index.entries if self.index is not None and self.chooses(context) else 0

    @property
    def step(self) -> tuple[int, int]:
        """The numbers of columns of one head's query and of its result, for one new token."""
        return (self.key, self.value) if self.latent is None else (sum(self.latent), self.latent[0])

    def state_bytes(self, columns: int) -> int:
        """Bytes of a token's partial state in a layer: float32 o of so many columns, and lse."""
        return FP32 * self.heads * (columns + 1)

    @property
    def expansion(self) -> int:
        """Operations that make the keys and values of a token from its latent."""
        rank, shared = self.latent or (0, 0)
        return 2 * self.heads * rank * (self.key - shared + self.value)


@dataclass(frozen=True)
class Weights:
    """Numbers of weights, by what becomes of them when a model is split over ranks."""

    q: int = 0  # projections of queries, and the one out of latents: split by heads
    queries: int = 0  # of these, the ones that make queries, which more ranks may share out
    kv: int = 0  # projections of keys and values: split by heads, as far as these go
    split: int = 0  # other matrices in layers: every rank has a part of each
    whole: int = 0  # matrices that every rank has: of layers with a state, of latents, of routers
    vectors: int = 0  # norms, and biases of these
    head: int = 0  # the matrix that makes logits, which the embedding may be as well
    embedding: int = 0  # read one row per token; 0: the head is used
    tables: int = 0  # other embeddings, as of positions, that every rank has
    experts: int = 0  # every rank has a part of each expert
    num_experts: int = 1  # in a layer
    chosen: int = 1  # of these, by a token
    itemsize: float = BF16  # bytes of a weight
    matrix_itemsize: float = BF16  # of one in q, kv and split
    expert_itemsize: float = BF16

    @property
    def total(self) -> int:
        layers = self.q + self.kv + self.split + self.whole + self.vectors + self.experts
        return layers + self.head + self.embedding + self.tables

    @property
    def num_bytes(self) -> float:
        matrices = self.q + self.kv + self.split
        others = self.itemsize * (self.total - matrices - self.experts)
        return others + self.matrix_itemsize * matrices + self.expert_itemsize * self.experts

    def quantised(self, dtype: str) -> Weights:
        """The weights as `hf.from_pretrained(weights=dtype)` keeps them."""
        itemsize = WEIGHT_DTYPES[dtype]
        return replace(self, matrix_itemsize=itemsize, expert_itemsize=itemsize)

    def share_of_experts(self, tokens: int) -> float:
        """Expected share of the experts that `tokens` tokens need, if all are equally likely."""
        return 1 - (1 - self.chosen / self.num_experts) ** tokens


@dataclass(frozen=True)
class Model:
    """A decoder, and how its cache is kept."""

    name: str
    hidden: int
    vocab: int
    attention: tuple[Attention, ...]
    weights: Weights
    layers: int  # of all kinds
    sums: int  # activations that ranks with split weights add up in a pass, without the embedding
    kv_dtype: str = "bf16"
    states_bytes: int = 0  # of layers with a state in place of keys, for a sequence of any length
    not_split: str = ""  # why the weights cannot be split, in a sentence
    not_cut: str = ""  # the modules that every rank then has whole, where these are much
    prompts_not_split: str = ""  # why the tokens of a prompt cannot be split over ranks
    # The number of newest tokens, over all ranks, whose keys are on GPUs; None if all keys are.
    near_tokens: int | None = None

    def with_far_keys(self, near_tokens: int) -> Model:
        """The model with the keys of older tokens on the host.

        Raises:
            ValueError: they cannot move there, as `hf.enable` says, too.
        """
        if any(layers.latent or layers.index for layers in self.attention):
            has_index = any(layers.index for layers in self.attention)
            what = "an index that chooses keys" if has_index else "latents"
            raise ValueError(
                f"far keys are not supported with {what}, as {self.name} has; leave --far out"
            )
        why = self.prompts_not_split or "with far keys every rank reads the whole prompt"
        return replace(self, near_tokens=near_tokens, prompts_not_split=why)

    @property
    def kv_heads(self) -> int:
        """The most ranks that can split the KV heads of every layer."""
        return math.gcd(*(layers.kv_heads for layers in self.attention))

    @property
    def cut_heads(self) -> int:
        """The most ranks that can split the projections of heads; latents serve all heads."""
        return math.gcd(*(x.heads if x.latent else x.kv_heads for x in self.attention))


def llama(
    name: str,
    layers: int,
    hidden: int,
    intermediate: int,
    heads: int,
    kv_heads: int,
    vocab: int,
    head_dim: int = 128,
    tied: bool = False,  # the embedding is lm_head
) -> Model:
    """Return the shape of a dense Llama."""
    head = hidden * head_dim  # weights of a head in a projection
    weights = Weights(
        q=layers * head * heads,
        queries=layers * head * heads,
        kv=layers * head * kv_heads * 2,
        split=layers * (head * heads + 3 * hidden * intermediate),
        vectors=(2 * layers + 1) * hidden,
        head=vocab * hidden,
        embedding=0 if tied else vocab * hidden,
    )
    attention = Attention(layers, heads, kv_heads, head_dim, head_dim)
    return Model(name, hidden, vocab, (attention,), weights, layers, sums=2 * layers)


def qwen3_30b_a3b() -> Model:
    """Return the shape of Qwen3 30B A3B: each of its 48 layers has 128 experts."""
    layers, hidden, experts = 48, 2048, 128
    attention = Attention(layers, heads=32, kv_heads=4, key=128, value=128)
    head = layers * hidden * attention.key
    weights = Weights(
        q=head * attention.heads,
        queries=head * attention.heads,
        kv=head * attention.kv_heads * 2,
        split=head * attention.heads,
        whole=layers * hidden * experts,
        vectors=layers * (2 * hidden + 2 * attention.key) + hidden,
        head=151936 * hidden,
        embedding=151936 * hidden,
        experts=layers * experts * 3 * hidden * 768,
        num_experts=experts,
        chosen=8,
    )
    return Model("Qwen3 30B A3B", hidden, 151936, (attention,), weights, layers, sums=2 * layers)


def glm_4_7_flash() -> Model:
    """Return the shape of GLM-4.7-Flash: its cache holds latents, its first layer is dense, and
    each of the 46 others has 64 experts and a shared one."""
    layers, hidden, experts = 47, 2048, 64
    queries, latent, shared = 768, 512, 64  # columns of the latents and of the key all heads share
    attention = Attention(layers, 20, kv_heads=1, key=256, value=256, latent=(latent, shared))
    mlp = 3 * hidden * 1536  # of an expert
    keys_and_values = attention.key - shared + attention.value
    weights = Weights(
        q=layers * attention.heads * (queries * attention.key + latent * keys_and_values),
        queries=layers * attention.heads * queries * attention.key,
        split=layers * attention.heads * attention.value * hidden
        + 3 * hidden * 10240
        + (layers - 1) * mlp,
        whole=layers * hidden * (queries + latent + shared) + (layers - 1) * hidden * experts,
        vectors=layers * (2 * hidden + queries + latent) + hidden,
        head=154880 * hidden,
        embedding=154880 * hidden,
        experts=(layers - 1) * experts * mlp,
        num_experts=experts,
        chosen=4,
    )
    return Model("GLM-4.7-Flash", hidden, 154880, (attention,), weights, layers, sums=2 * layers)


NAMED = {
    "llama-3.2-1b": llama("Llama 3.2 1B", 16, 2048, 8192, 32, 8, 128256, 64, tied=True),
    "llama-3.2-3b": llama("Llama 3.2 3B", 28, 3072, 8192, 24, 8, 128256, tied=True),
    "llama-3.1-8b": llama("Llama 3.1 8B", 32, 4096, 14336, 32, 8, 128256),
    "llama-3.1-70b": llama("Llama 3.1 70B", 80, 8192, 28672, 64, 8, 128256),
    "llama-3.1-405b": llama("Llama 3.1 405B", 126, 16384, 53248, 128, 8, 128256),
    "qwen3-30b-a3b": qwen3_30b_a3b(),
    "glm-4.7-flash": glm_4_7_flash(),
}
