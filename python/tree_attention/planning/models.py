# SPDX-License-Identifier: BSD-3-Clause
"""Shapes of dense models, by name or from config.json."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

BF16, FP32 = 2, 4  # bytes of a weight, an activation, a key; of a partial state
# Bytes of a key's or value's element, and of the scale that goes with those of a token and head.
KV_DTYPES = {"bf16": (BF16, 0), "int8": (1, FP32), "fp8": (1, FP32)}


@dataclass(frozen=True)
class Model:
    """A dense Llama: its shape, from config.json, and how its cache is kept."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocab: int
    head_dim: int = 128
    tied: bool = False  # the embedding is lm_head
    kv_dtype: str = "bf16"

    @property
    def layer_weights(self) -> int:
        """Number of weights in the matrices of a layer."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def q_weights(self) -> int:
        return self.hidden * self.head_dim * self.heads

    @property
    def kv_weights(self) -> int:
        """Number of weights in k and v of a layer."""
        return 2 * self.hidden * self.head_dim * self.kv_heads

    @property
    def end_weights(self) -> int:
        """Number of weights in the embedding, and as many in lm_head."""
        return self.vocab * self.hidden

    @property
    def kv_bytes(self) -> int:
        """Size in bytes of a token's keys and values in a layer."""
        itemsize, scale = KV_DTYPES[self.kv_dtype]
        return 2 * self.kv_heads * (self.head_dim * itemsize + scale)

    @property
    def state_bytes(self) -> int:
        """Size in bytes of a token's partial state in a layer: float32 o and lse."""
        return FP32 * self.heads * (self.head_dim + 1)

    @property
    def query_bytes(self) -> int:
        return BF16 * self.heads * self.head_dim


NAMED = {
    "llama-3.2-1b": Model("Llama 3.2 1B", 16, 2048, 8192, 32, 8, 128256, 64, tied=True),
    "llama-3.2-3b": Model("Llama 3.2 3B", 28, 3072, 8192, 24, 8, 128256, tied=True),
    "llama-3.1-8b": Model("Llama 3.1 8B", 32, 4096, 14336, 32, 8, 128256),
    "llama-3.1-70b": Model("Llama 3.1 70B", 80, 8192, 28672, 64, 8, 128256),
    "llama-3.1-405b": Model("Llama 3.1 405B", 126, 16384, 53248, 128, 8, 128256),
}
# Families by `model_type` whose layers are four matrices of attention and three of an MLP.
FAMILIES = (
    *("llama", "mistral", "ministral", "qwen2", "qwen3", "gemma", "granite", "olmo", "olmo2"),
    *("smollm3", "seed_oss", "helium", "glm", "glm4"),
)
_SIZES = (
    *("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size"),
    *("num_attention_heads", "num_key_value_heads"),
)


def find_model(name: str) -> Model:
    """The named shape, or that of a directory with config.json.

    Raises:
        ValueError: there is neither, or the model is of another kind; the message says which.
    """
    if name in NAMED:
        return NAMED[name]
    if not (Path(name) / "config.json").is_file():
        raise ValueError(
            f"{name} is no directory with config.json, and the named shapes are {', '.join(NAMED)}"
        )
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise ValueError(
            "reading config.json needs transformers: pip install 'tree-attention[hf]'"
        ) from error
    try:
        config = AutoConfig.from_pretrained(name, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the classes of transformers' checks are of many kinds
        reason = " ".join(str(error).split())
        raise ValueError(f"{name}/config.json cannot be read: {reason}") from error
    return from_config(Path(name).resolve().name, config)


def from_config(name: str, config: Any) -> Model:
    """The shape that a configuration of transformers describes.

    Raises:
        ValueError: it is none of a dense model whose layers all see the whole context.
    """
    if config.model_type not in FAMILIES:
        raise ValueError(
            f"{name} is of type {config.model_type!r}; known are dense models whose layers all "
            f"see the whole context: {', '.join(FAMILIES)}"
        )
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    # Mistral's window is that of all layers, and comes without layer_types.
    if kinds or getattr(config, "sliding_window", None) is not None:
        raise ValueError(f"{name} has layers that see a window: what they keep is not planned for")
    for size in _SIZES:
        if (getattr(config, size) or 0) < 1:
            raise ValueError(f"{name}: {size} must be at least 1, got {getattr(config, size)}")
    return Model(
        name,
        config.num_hidden_layers,
        config.hidden_size,
        config.intermediate_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.vocab_size,
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        tied=config.tie_word_embeddings,
    )
