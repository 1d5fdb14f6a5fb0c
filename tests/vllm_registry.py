# SPDX-License-Identifier: BSD-3-Clause
"""What the tested vLLM makes of the architectures in docs/models.md, by its registry of models.

`vllm/test_registry.py` compares it with vLLM, which most environments of tests do not have.
"""

# By what docs/models.md says: the tests of the engine run the first, and nothing runs the others.
SERVED = {
    "tested": (
        *("BloomForCausalLM", "Gemma2ForCausalLM", "LlamaForCausalLM"),
        *("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
    ),
    "listed": (
        *("ApertusForCausalLM", "Cohere2ForCausalLM", "CohereForCausalLM"),
        *("Ernie4_5_MoeForCausalLM", "Ernie4_5ForCausalLM", "Exaone4ForCausalLM"),
        *("Gemma3ForCausalLM", "Gemma4ForCausalLM", "GemmaForCausalLM", "Glm4ForCausalLM"),
        *("Glm4MoeForCausalLM", "GPT2LMHeadModel", "GptOssForCausalLM"),
        *("GraniteForCausalLM", "GraniteMoeForCausalLM", "GraniteMoeHybridForCausalLM"),
        *("JambaForCausalLM", "Lfm2ForCausalLM", "Lfm2MoeForCausalLM"),
        *("MiniCPM3ForCausalLM", "MiniMaxM2ForCausalLM", "MistralForCausalLM"),
        *("MixtralForCausalLM", "NemotronForCausalLM", "NemotronHForCausalLM"),
        *("OlmoeForCausalLM", "OlmoHybridForCausalLM", "OPTForCausalLM", "Phi3ForCausalLM"),
        *("PhiMoEForCausalLM", "Qwen2ForCausalLM", "Qwen2MoeForCausalLM"),
        *("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen3NextForCausalLM"),
        *("StableLmForCausalLM",),
    ),
    "listed, by transformers": (
        *("ArceeForCausalLM", "GlmForCausalLM", "GPTBigCodeForCausalLM"),
        *("GPTNeoXForCausalLM", "HunYuanDenseV1ForCausalLM", "Olmo2ForCausalLM"),
        *("Olmo3ForCausalLM", "OlmoForCausalLM", "PhiForCausalLM", "SeedOssForCausalLM"),
        *("SmolLM3ForCausalLM", "Starcoder2ForCausalLM"),
    ),
    "refused: latents": (
        *("AXK1ForCausalLM", "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"),
        *("DeepseekV32ForCausalLM", "Glm4MoeLiteForCausalLM", "GlmMoeDsaForCausalLM"),
        *("KimiLinearForCausalLM", "LongcatFlashForCausalLM"),
    ),
    "not listed": (
        *("AXK2ForCausalLM", "BambaForCausalLM", "BioGptForCausalLM", "BitNetForCausalLM"),
        *("Dots1ForCausalLM", "Dots3NoteForCausalLM", "HYV4ForCausalLM", "HeliumForCausalLM"),
        *("Lfm3ForCausalLM", "MiniMaxM3VLForCausalLM", "MinistralForCausalLM"),
        *("Mistral4ForCausalLM", "MptForCausalLM", "PersimmonForCausalLM"),
        *("XGLMForCausalLM", "YoutuForCausalLM"),
    ),
}
# The name in the checkpoints where transformers' class has another one.
PUBLISHED = {"PhimoeForCausalLM": "PhiMoEForCausalLM"}


def served(architecture: str) -> str:
    """Return the cell of docs/models.md for a class of transformers."""
    name = PUBLISHED.get(architecture, architecture)
    cells = [cell for cell, names in SERVED.items() if name in names]
    assert len(cells) == 1, f"SERVED of tests/vllm_registry.py must have {name} once"
    return cells[0]
