# SPDX-License-Identifier: BSD-3-Clause
"""Model families: those that work, those that are refused, and their lists in docs/models.md.

Each is made tiny and random from its configuration class in transformers, by name, as releases
differ in the families that they have.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from distributed import preload
from hf_refusal import Refusal, no_longer_refused

VOCAB_SIZE = 97
PAD, EOS = 0, 1
WINDOW = 8

_TINY = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": PAD,
    "bos_token_id": 2,
    "eos_token_id": EOS,
    # With the usual 0.02 attention is a plain mean, and the next token is always the last one.
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}
_HEADS_OF_16 = {"head_dim": 16}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_WINDOW = {"sliding_window": WINDOW}
_MULTIPLIERS = {"attention_multiplier": 0.4, "residual_multiplier": 0.5, "logits_scaling": 4.0}
_ALTERNATING = {**_WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
# Multi-head latent attention: each head has 16 + 8 columns of keys and 12 of values.
_LATENTS = {
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "head_dim": 8,
    "num_key_value_heads": 4,
}
_ROUTED_EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
    "original_max_position_embeddings": 64,
}


@dataclass(frozen=True)
class Family:
    """A configuration class of transformers, and its options in addition to the sizes of all."""

    config: str
    options: dict[str, Any]
    plain_attention: str = "sdpa"  # eager where sdpa lacks what the model needs: softcap, sinks
    auto: str = "AutoModelForCausalLM"
    is_padded: bool = True  # prompts of different lengths may be one batch

    @property
    def exists(self) -> bool:
        """Whether this release of transformers has it."""
        return hasattr(transformers, self.config)


def _family(config: str, *options: dict[str, Any], **fields: Any) -> Family:
    merged = {key: value for option in options for key, value in option.items()}
    return Family(config, merged, **fields)


def _eager(config: str, *options: dict[str, Any], **fields: str) -> Family:
    return _family(config, *options, plain_attention="eager", **fields)


WORKING: dict[str, Family] = {
    "A.X K1": _family("AXK1Config", _LATENTS, _ROUTED_EXPERTS),
    "Apertus": _family("ApertusConfig"),
    "Arcee": _family("ArceeConfig"),
    "BioGPT": _family("BioGptConfig"),
    "BitNet": _family("BitNetConfig"),
    "Cohere": _family("CohereConfig"),
    "Cohere 2": _family("Cohere2Config", _ALTERNATING),
    "DeepSeek-V2": _family("DeepseekV2Config", _LATENTS, _ROUTED_EXPERTS, {"q_lora_rank": None}),
    "DeepSeek-V3": _family(
        "DeepseekV3Config", _LATENTS, _ROUTED_EXPERTS, {"rope_parameters": _YARN}
    ),
    "dots.llm1": _family("Dots1Config", _EXPERTS, {"n_routed_experts": 4, "n_shared_experts": 1}),
    "ERNIE 4.5": _family("Ernie4_5Config", _HEADS_OF_16),
    "ERNIE 4.5 MoE": _family(
        "Ernie4_5_MoeConfig", {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 48}
    ),
    "EXAONE 4": _family("Exaone4Config", _ALTERNATING),
    "Gemma": _family("GemmaConfig", _HEADS_OF_16),
    "Gemma 2": _family(
        "Gemma2Config",
        _HEADS_OF_16,
        _ALTERNATING,
        {"attn_logit_softcapping": 5.0},
        plain_attention="eager",
    ),
    "Gemma 3": _family("Gemma3TextConfig", _HEADS_OF_16, _ALTERNATING),
    "Gemma 4": _family(
        "Gemma4TextConfig", _HEADS_OF_16, _ALTERNATING, {"vocab_size_per_layer_input": VOCAB_SIZE}
    ),
    "GLM": _family("GlmConfig", _HEADS_OF_16),
    "GLM-4": _family("Glm4Config", _HEADS_OF_16),
    "GLM-4.5": _family("Glm4MoeConfig", {"n_routed_experts": 4}, _EXPERTS),
    "GLM-4.7-Flash": _family("Glm4MoeLiteConfig", _LATENTS, _ROUTED_EXPERTS),
    "GPT-2": _family("GPT2Config"),
    "GPT-BigCode": _family("GPTBigCodeConfig"),
    "GPT-NeoX": _family("GPTNeoXConfig"),
    "GPT-OSS": _family(
        "GptOssConfig", _HEADS_OF_16, _ALTERNATING, _LOCAL_EXPERTS, plain_attention="eager"
    ),
    "Granite": _family("GraniteConfig", _MULTIPLIERS),
    "GraniteMoE": _family("GraniteMoeConfig", _MULTIPLIERS, _LOCAL_EXPERTS),
    "Helium": _family("HeliumConfig", _HEADS_OF_16),
    "HunYuan": _family("HunYuanDenseV1Config", _HEADS_OF_16),
    "Llama": _family("LlamaConfig"),
    "LongCat-Flash": _family(
        "LongcatFlashConfig",
        _LATENTS,
        _ROUTED_EXPERTS,
        {
            "num_layers": 1,
            "ffn_hidden_size": 96,
            "expert_ffn_hidden_size": 48,
            "moe_topk": 2,
            "zero_expert_num": 1,
        },
    ),
    "MiniCPM3": _family("MiniCPM3Config", _LATENTS),
    "MiniMax-M2": _family("MiniMaxM2Config", _HEADS_OF_16, _LOCAL_EXPERTS),
    "Ministral": _family("MinistralConfig", _HEADS_OF_16, _ALTERNATING),
    "Mistral": _family("MistralConfig", _WINDOW),
    "Mistral 4": _family("Mistral4Config", _LATENTS, _ROUTED_EXPERTS, auto="Mistral4ForCausalLM"),
    "Mixtral": _family("MixtralConfig", _WINDOW, _LOCAL_EXPERTS),
    "Nemotron": _family("NemotronConfig"),
    "OLMo": _family("OlmoConfig"),
    "OLMo 2": _family("Olmo2Config"),
    "OLMo 3": _family("Olmo3Config", _ALTERNATING),
    "OLMoE": _family("OlmoeConfig", _EXPERTS),
    "OPT": _family("OPTConfig", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "Persimmon": _family("PersimmonConfig"),
    "Phi": _family("PhiConfig"),
    "Phi-3": _family("Phi3Config", _WINDOW),
    "Phi-3.5-MoE": _family("PhimoeConfig", _WINDOW, _LOCAL_EXPERTS),
    "Qwen2": _family("Qwen2Config", _ALTERNATING, {"use_sliding_window": True}),
    "Qwen2-MoE": _family("Qwen2MoeConfig", _EXPERTS, {"shared_expert_intermediate_size": 48}),
    "Qwen3": _family("Qwen3Config", _HEADS_OF_16),
    "Qwen3-MoE": _family("Qwen3MoeConfig", _HEADS_OF_16, _EXPERTS),
    "Seed-OSS": _family("SeedOssConfig", _HEADS_OF_16),
    "SmolLM3": _family("SmolLM3Config", _ALTERNATING, {"use_sliding_window": True}),
    "StableLM": _family("StableLmConfig"),
    "StarCoder2": _family("Starcoder2Config", _WINDOW),
    "Youtu": _family("YoutuConfig", _LATENTS),
}

# Those with multi-head latent attention.
LATENT = [name for name, family in WORKING.items() if "kv_lora_rank" in family.options]

_LINEAR_FIRST = {"layer_types": ["linear_attention", "full_attention"]}
_DELTA_RULE = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_STATE_SPACE = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16}
_SHARED_EXPERT = {"shared_expert_intermediate_size": 48}

# Of these some layers keep a state, and the others keys and values.
HYBRIDS: dict[str, Family] = {
    "Bamba": _family("BambaConfig", _STATE_SPACE, {"attn_layer_indices": [1]}),
    "Granite 4": _family(
        "GraniteMoeHybridConfig",
        _LOCAL_EXPERTS,
        _LINEAR_FIRST,
        _STATE_SPACE,
        {"shared_intermediate_size": 48},
    ),
    "Jamba": _family(
        "JambaConfig", {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4}
    ),
    "Kimi Linear": _family(
        "KimiLinearConfig",
        _LATENTS,
        {"q_lora_rank": None, "num_experts": 4, "num_experts_per_token": 2},
        {"moe_intermediate_size": 48, "num_shared_experts": 1},
        {"linear_num_heads": 4, "linear_head_dim": 16},
        _LINEAR_FIRST,
    ),
    "LFM2": _family("Lfm2Config", {"layer_types": ["conv", "full_attention"]}),
    "LFM2-MoE": _family(
        "Lfm2MoeConfig",
        _EXPERTS,
        {"num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
    ),
    "LFM3": _family("Lfm3Config", _WINDOW, {"layer_types": ["conv", "sliding_attention"]}),
    "Nemotron-H": _family(
        "NemotronHConfig",
        _HEADS_OF_16,
        _EXPERTS,
        {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2},
        {"n_routed_experts": 4, "moe_shared_expert_intermediate_size": 48},
    ),
    "OLMo Hybrid": _family("OlmoHybridConfig", _LINEAR_FIRST),
    "Qwen3-Next": _family(
        "Qwen3NextConfig", _HEADS_OF_16, _EXPERTS, _SHARED_EXPERT, _LINEAR_FIRST, _DELTA_RULE
    ),
    "Qwen3.5": _family("Qwen3_5TextConfig", _HEADS_OF_16, _LINEAR_FIRST, _DELTA_RULE),
    "Qwen3.5-MoE": _family(
        "Qwen3_5MoeTextConfig", _HEADS_OF_16, _EXPERTS, _SHARED_EXPERT, _LINEAR_FIRST, _DELTA_RULE
    ),
}


# The number of keys that a query attends to: far below what the tests' prompts have.
TOPK = 8
_INDEX = {"index_topk": TOPK, "index_n_heads": 8, "index_head_dim": 16}
_THREE_LAYERS = {"num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"]}
_OTHER_LATENTS = {
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 20, "kv_lora_rank": 24},
    **{"head_dim": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12},
}

# Of these an index chooses the keys of each query.
CHOOSING: dict[str, Family] = {
    "A.X K2": _family("AXK2Config", _LATENTS, _ROUTED_EXPERTS, _INDEX),
    "DeepSeek-V3.2": _family(
        "DeepseekV32Config", _LATENTS, _ROUTED_EXPERTS, _INDEX, {"rope_parameters": _YARN}
    ),
    "dots3": _family(
        "Dots3NoteTextConfig",
        _LATENTS,
        _ROUTED_EXPERTS,
        _INDEX,
        _WINDOW,
        {
            "head_dim": 24,
            "layer_types": ["indexed_attention", "sliding_attention"],
            "per_layer_config": {1: _OTHER_LATENTS},
        },
    ),
    "GLM-5": _family("GlmMoeDsaConfig", _LATENTS, _ROUTED_EXPERTS, _INDEX, _THREE_LAYERS),
    "MiniMax-M3": _family(
        "MiniMaxM3VLTextConfig",
        _HEADS_OF_16,
        _LOCAL_EXPERTS,
        {"index_n_heads": 2, "index_head_dim": 16, "index_block_size": 4, "index_topk_blocks": 3},
        {"layer_types": ["full_attention", "minimax_m3_sparse"], "rotary_dim": 8},
        {"dense_intermediate_size": 96, "shared_intermediate_size": 48},
        is_padded=False,
    ),
    "HunYuan 4": _eager("HYV4Config", _LATENTS, _ROUTED_EXPERTS, _INDEX, _THREE_LAYERS),
}

# Of these the attention is code of their own, and their weights are not split.
OWN_ATTENTION: dict[str, Family] = {
    "BLOOM": _eager("BloomConfig"),
    "MPT": _eager("MptConfig", {"use_cache": True, "initializer_range": 0.4}),
    "XGLM": _eager("XGLMConfig", {"ffn_dim": 96}),
}

_KINDS_OF_LAYERS = "layers must be of the types"
_ATTENTION_HIDDEN = "does not let its attention be chosen"
_CACHED_KEYS = "work on cached keys themselves"
_TEXT_ALONE = "must be a decoder, got"

REFUSED: tuple[Refusal, ...] = (
    Refusal(
        "all layers keep a state, and there are no keys to spread",
        "a layer must have keys to spread over ranks",
        {
            "Falcon Mamba": _eager("FalconMambaConfig"),
            "Mamba": _eager("MambaConfig"),
            "Mamba 2": _eager("Mamba2Config", {"num_heads": 8, "head_dim": 16, "n_groups": 1}),
        },
    ),
    Refusal(
        "each layer keeps both a state and keys",
        _KINDS_OF_LAYERS,
        {"Falcon-H1": _eager("FalconH1Config")},
    ),
    Refusal(
        "states are kept in a cache of the model's own class",
        "takes only a cache of the class",
        {"MiniMax-01": _eager("MiniMaxConfig", _LOCAL_EXPERTS)},
    ),
    Refusal(
        "the attention computes with the cached keys in code of its own",
        _CACHED_KEYS,
        {
            "DiffLlama": _eager("DiffLlamaConfig"),
            "Doge": _eager("DogeConfig"),
            "JetMoe": _eager("JetMoeConfig"),
        },
    ),
    Refusal(
        "transformers lets no other attention function be chosen for them",
        _ATTENTION_HIDDEN,
        {"Falcon": _eager("FalconConfig"), "RWKV": _eager("RwkvConfig")},
    ),
    Refusal(
        "transformers before 5.24 lets no other attention function be chosen for them",
        _ATTENTION_HIDDEN,
        {
            "CodeGen": _eager("CodeGenConfig", {"rotary_dim": 8}),
            "GPT-J": _eager("GPTJConfig", {"rotary_dim": 8}),
        },
        until="5.24",
    ),
    Refusal(
        "some layers use the keys of another one",
        "shares keys between layers",
        {
            "Gemma 3n": _eager(
                "Gemma3nTextConfig",
                _HEADS_OF_16,
                {
                    "num_kv_shared_layers": 1,
                    "layer_types": ["full_attention"] * 2,
                    "vocab_size_per_layer_input": VOCAB_SIZE,
                },
            )
        },
    ),
    Refusal(
        "keys are seen in chunks; refused once the text is longer than one chunk",
        "causal and sliding-window masks only, not chunked",
        {
            "Llama 4": _eager(
                "Llama4TextConfig", _HEADS_OF_16, _LOCAL_EXPERTS, {"attention_chunk_size": WINDOW}
            )
        },
    ),
    Refusal(
        "there is an encoder for text in addition to the decoder",
        _TEXT_ALONE,
        {
            "BART": _eager("BartConfig", auto="AutoModelForSeq2SeqLM"),
            "T5": _eager("T5Config", auto="AutoModelForSeq2SeqLM"),
        },
    ),
)

_LATER = no_longer_refused(REFUSED)
# Those whose weights can be split.
FAMILIES_TO_SPLIT: dict[str, Family] = {
    name: x for name, x in (WORKING | HYBRIDS | CHOOSING | _LATER).items() if x.exists
}


def _modules() -> list[str]:
    """Where transformers has the models."""
    families = FAMILIES_TO_SPLIT | {name: x for name, x in OWN_ATTENTION.items() if x.exists}
    configs = (getattr(transformers, x.config).__module__ for x in families.values())
    return sorted({name.replace(".configuration_", ".modeling_") for name in configs})


# A rank that is new would import them for half of a short test's time.
preload("hf_families", *_modules())


def sizes_of_tensor_groups(name: str, world_size: int) -> list[int]:
    """Every tensor_parallel_size that divides the world and the heads that it divides."""
    of_4 = dict.fromkeys((*LATENT, *CHOOSING, *_LATER, "Kimi Linear"), 4)
    heads = {"GPT-BigCode": 1, **of_4, "dots3": 2, "MiniMax-M3": 2}.get(name, 2)
    return [n for n in (1, 2, 4) if world_size % n == 0 and heads % n == 0]


def make_model(family: Family) -> PreTrainedModel:
    """A model of the family in float32 with seeded weights, norms and biases too."""
    config = getattr(transformers, family.config)(**copy.deepcopy({**_TINY, **family.options}))
    with torch.random.fork_rng():
        torch.manual_seed(7)
        kind = getattr(transformers, family.auto)
        make = kind._from_config if issubclass(kind, PreTrainedModel) else kind.from_config
        model = make(config, attn_implementation=family.plain_attention, dtype=torch.float32)
        for x in model.parameters():
            if not x.is_meta and x.min() == x.max():  # ones of a norm, zeros of a bias
                x.data += 0.12 * torch.randn_like(x)  # by which no two best tokens are near a tie
    return model.eval()
