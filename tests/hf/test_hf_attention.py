# SPDX-License-Identifier: BSD-3-Clause
"""The attention function in one process: with and without caches, and what it refuses."""

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    Llama4TextConfig,
    PreTrainedModel,
)

from hf_models import CONFIGS, make_model, make_prompts
from tree_attention import hf
from tree_attention.hf import CACHE_NAME

GREEDY = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}


@pytest.fixture
def model() -> PreTrainedModel:
    return make_model("llama", "tree_attention")


@torch.no_grad()
def _logits(model: PreTrainedModel, **arguments: Any) -> Tensor:
    """Logits of the tokens, without those of the padding."""
    prompts = make_prompts()
    logits = model(**prompts, **arguments).logits
    return logits[prompts["attention_mask"].bool()]


@pytest.mark.parametrize("name", CONFIGS)
def test_without_cache(name: str) -> None:
    """Plain key and value tensors, every kind of attention. The bound is some 170 roundings
    of the largest logit: two layers amplify what differs."""
    expected = _logits(make_model(name), use_cache=False)
    found = _logits(make_model(name, "tree_attention"), use_cache=False)
    assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()


@pytest.mark.parametrize("name", ["llama", "mistral_window", "gemma2", "gpt_oss", "deepseek"])
def test_with_the_caches_of_transformers(name: str) -> None:
    """DynamicCache, whose sliding layers drop old keys: nothing is sharded, tokens are right."""
    expected = make_model(name).generate(**make_prompts(), **GREEDY)
    model = make_model(name, "tree_attention")
    cache = DynamicCache(config=model.config)
    assert torch.equal(model.generate(**make_prompts(), **GREEDY, **{CACHE_NAME: cache}), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    """Logits as near to float32 as those of transformers in the same dtype, sinks included."""
    exact = _logits(make_model("gpt_oss"))
    expected = _logits(make_model("gpt_oss").to(dtype))
    found = _logits(make_model("gpt_oss", "tree_attention").to(dtype))
    assert found.dtype == dtype
    assert (found - exact).abs().mean() <= 2 * (expected - exact).abs().mean()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_sharded_cache_needs_this_attention(attention: str) -> None:
    """Another attention function would silently attend to the keys of one rank."""
    model = make_model("llama", attention)
    message = "only attn_implementation='tree_attention' can use them"
    with pytest.raises(hf.WrongAttentionError, match=message):
        model.generate(**make_prompts(), **GREEDY, **{CACHE_NAME: hf.TreeCache(model.config)})


@torch.no_grad()
def test_latent_attention_needs_enable() -> None:
    """Otherwise it expands what the cache returns by itself."""
    model = make_model("deepseek", "tree_attention")
    with pytest.raises(hf.WrongAttentionError, match="multi-head latent attention needs enable"):
        model(**make_prompts(), **{CACHE_NAME: hf.TreeCache(model.config)})


def test_gradients_are_refused(model: PreTrainedModel) -> None:
    message = r"computes no gradients; call the model under torch.no_grad\(\)"
    with pytest.raises(NotImplementedError, match=message):
        model(**make_prompts())


@torch.no_grad()
def test_dropout_is_refused() -> None:
    model = make_model("llama", "tree_attention")
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    model(**make_prompts())
    with pytest.raises(
        NotImplementedError, match=r"dropout must be 0, got 0.1; call model.eval\(\)"
    ):
        model.train()(**make_prompts())


@torch.no_grad()
def test_weights_are_refused(model: PreTrainedModel) -> None:
    with pytest.raises(NotImplementedError, match="output_attentions is not supported"):
        model(**make_prompts(), output_attentions=True)


@torch.no_grad()
def test_other_masks_are_refused(model: PreTrainedModel) -> None:
    ids = make_prompts()["input_ids"]
    length = ids.shape[1]
    with pytest.raises(NotImplementedError, match=r"from a 2-D padding mask, got a tensor of sha"):
        model(ids, attention_mask=torch.ones(3, 1, length, length).bool())
    holes = torch.ones(3, length).long()
    holes[1, 5] = holes[1, 7] = 0
    with pytest.raises(NotImplementedError, match=r"at most one hole, .* row 1 has a second hole"):
        model(ids, attention_mask=holes)
    with pytest.raises(NotImplementedError, match=r"the padding mask must have shape"):
        cache = hf.TreeCache(model.config)
        model(ids, **{CACHE_NAME: cache})
        model(ids[:, :1], attention_mask=torch.ones(3, 1).long(), **{CACHE_NAME: cache})


@torch.no_grad()
def test_packed_sequences_are_refused(model: PreTrainedModel) -> None:
    positions = torch.cat((torch.arange(20), torch.arange(17)))[None].expand(3, -1)
    with pytest.raises(NotImplementedError, match="causal and sliding-window masks only"):
        model(make_prompts()["input_ids"], position_ids=positions, use_cache=False)


@torch.no_grad()
def test_chunked_layers_are_refused_when_they_matter() -> None:
    config = Llama4TextConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=32,
        intermediate_size_mlp=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=2,
        attention_chunk_size=16,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="tree_attention").eval()
    cache = hf.TreeCache(config)
    model(torch.ones(1, 16).long(), **{CACHE_NAME: cache})
    with pytest.raises(NotImplementedError, match="causal and sliding-window masks only"):
        model(torch.ones(1, 1).long(), **{CACHE_NAME: cache})


@pytest.mark.parametrize(
    ("keyword", "sentence"),
    [
        *((x, f"{x} is not supported") for x in ("position_bias", "alibi", "head_mask")),
        ("cu_seq_lens_q", "cu_seq_lens_q is not supported"),
        *((x, "an index chooses the keys of this model") for x in ("indices", "block_indices")),
    ],
)
@torch.no_grad()
def test_unknown_terms_are_refused(model: PreTrainedModel, keyword: str, sentence: str) -> None:
    with pytest.raises(NotImplementedError, match=f"tree_attention: {sentence}"):
        model(**make_prompts(), **{keyword: torch.ones(1)})


@torch.no_grad()
def test_layers_of_different_lengths_are_refused(model: PreTrainedModel) -> None:
    prompts = make_prompts()
    cache = hf.TreeCache(model.config)
    model(**prompts, **{CACHE_NAME: cache})
    layer = model.model.layers[1]
    hook = layer.register_forward_pre_hook(lambda *_: cache.layers[1].cut(36))
    with pytest.raises(
        NotImplementedError, match="the mask is for 38 keys and the layer has 37; models whose lay"
    ):
        model(prompts["input_ids"][:, :1], **{CACHE_NAME: cache})
    hook.remove()


@torch.no_grad()
def test_a_missing_mask_is_refused(model: PreTrainedModel) -> None:
    layer = model.model.layers[0].self_attn
    x = torch.randn(1, 3, 64)
    cos_sin = model.model.rotary_emb(x, torch.arange(3)[None])
    with pytest.raises(NotImplementedError, match="from a 2-D padding mask, got None"):
        layer(x, position_embeddings=cos_sin, attention_mask=None)
