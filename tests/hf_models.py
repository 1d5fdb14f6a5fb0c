# SPDX-License-Identifier: BSD-3-Clause
"""Tiny random transformers models: the same weights in every process, no download.

One for each kind of attention; `hf_families` has those of which only the family is tested.
"""

import copy
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)

from distributed import preload
from generations import left_padded

preload("transformers.generation.utils", "transformers.models.llama.modeling_llama")
preload("hf_models", "tree_attention.hf")

VOCAB_SIZE = 199  # no multiple of anything
PAD, EOS = 0, 1

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 16384,
    "pad_token_id": PAD,
    "bos_token_id": 2,
    "eos_token_id": EOS,
    # Large enough for scores that differ: with the usual 0.02 attention is a plain mean, and tests
    # could not tell which keys it saw.
    "initializer_range": 0.3,
}
_WINDOW = 8

CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(
        **_COMMON,
        tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "mistral": MistralConfig(**_COMMON, sliding_window=None),
    "mistral_window": MistralConfig(**_COMMON, sliding_window=_WINDOW),
    "gemma2": Gemma2Config(
        **_COMMON,
        sliding_window=_WINDOW,
        attn_logit_softcapping=5.0,
        tie_word_embeddings=False,
        query_pre_attn_scalar=8,
    ),
    "gpt_oss": GptOssConfig(
        **_COMMON,
        sliding_window=_WINDOW,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    "deepseek": DeepseekV3Config(
        **{**_COMMON, "num_key_value_heads": 8, "head_dim": 4},
        kv_lora_rank=24,
        q_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=6,
        first_k_dense_replace=2,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 256.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.8,
            "original_max_position_embeddings": 64,
        },
    ),
    "qwen3_moe": Qwen3MoeConfig(
        **_COMMON, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48
    ),
    "phi3": Phi3Config(**_COMMON, sliding_window=None),
}
OF_EXPERTS = ("gpt_oss", "qwen3_moe")


def make_model(
    name: str,
    attn_implementation: str | None = None,
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> PreTrainedModel:
    """A model of `CONFIGS`, with `changes` of its configuration, with seeded weights.

    The default attention is transformers' own of the widest use that computes this model: sdpa,
    and eager for those with softcap or sinks.
    """
    if attn_implementation is None:
        attn_implementation = "eager" if name in ("gemma2", "gpt_oss") else "sdpa"
    # from_config keeps and changes the object it is given.
    config = copy.deepcopy(CONFIGS[name])
    for key, value in changes.items():
        setattr(config, key, value)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation=attn_implementation, dtype=dtype
        )
        if name in OF_EXPERTS:
            model.set_experts_implementation("eager")  # the default has no float64
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if parameter_name.endswith("sinks"):
                    parameter.normal_(0.0, 2.0)  # or they would do next to nothing
    return model.eval()


def make_prompts(batch: int = 3, length: int = 37) -> dict[str, torch.Tensor]:
    """Left-padded prompts of `length`, `length - 11` and `length - 5` tokens, and so on."""
    return left_padded(VOCAB_SIZE, length, (0, 11, 5, 20)[:batch], seed=11)
