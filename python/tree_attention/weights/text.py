# SPDX-License-Identifier: BSD-3-Clause
"""The text of models that take images or sound as well: its configuration, and its modules."""

from typing import Any

import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration of a model's text; `config` itself for an encoder with a decoder."""
    return config if config.is_encoder_decoder else config.get_text_config(decoder=True)


def takes_more_than_text(model: PreTrainedModel) -> bool:
    """True for a model that has modules for images or sound, as well as for text."""
    return text_config(model.config) is not model.config


def text_of(model: PreTrainedModel) -> PreTrainedModel:
    """The part of a model whose attention has a cache: the model itself if it takes text alone."""
    if not takes_more_than_text(model):
        return model
    decoder: PreTrainedModel = model.get_decoder()
    return decoder


def model_of_text(config: PreTrainedConfig, **options: Any) -> PreTrainedModel:
    """A model of the text that `config` names: of the class that transformers has for it, or of the
    whole model's, without the modules for images or sound. `options` are those of `from_config`."""
    text = text_config(config)
    if type(text) in MODEL_FOR_CAUSAL_LM_MAPPING or not has_whole_class(config):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(text, **options)
        return model
    attention = options.pop("attn_implementation", None)
    model = AutoModelForMultimodalLM.from_config(config, **options)
    kept = {*text_of(model).modules(), model.get_output_embeddings()}
    _drop_all_but(model, kept)
    if attention is not None:  # encoders of images may know none of them
        text_of(model).set_attn_implementation(attention)
    return model


def share_of_text(config: PreTrainedConfig, model: PreTrainedModel) -> float:
    """The share of the numbers of a whole model's weights that `model`, of its text, has."""
    if not has_whole_class(config):
        return 1.0
    with torch.device("meta"):
        whole = AutoModelForMultimodalLM.from_config(config)
    count, of_all = (sum(x.numel() for x in m.parameters()) for m in (model, whole))
    return min(1.0, count / of_all)


def class_to_load(config: PreTrainedConfig) -> Any:
    """The class of transformers whose `from_pretrained` loads the checkpoint of `config` whole."""
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and has_whole_class(config):
        return AutoModelForMultimodalLM
    return AutoModelForCausalLM


def has_whole_class(config: PreTrainedConfig) -> bool:
    """True where transformers has a class for text together with images or sound."""
    return text_config(config) is not config and type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING


def dropped_names(model: PreTrainedModel) -> list[str]:
    """The names of the modules and parameters that `model_of_text` left empty, next to the text."""
    kept = {*text_of(model).modules(), model.get_output_embeddings()}
    return [
        own
        for module in model.modules()
        if module not in kept
        for own, child in (*module._modules.items(), *module._parameters.items())
        if child is None
    ]


def _drop_all_but(module: nn.Module, kept: set[nn.Module | None]) -> None:
    """Empties the places of all modules and parameters in which no module of `kept` is."""
    for name in dict(module.named_parameters(recurse=False)):
        module.register_parameter(name, None)
    for name, child in module.named_children():
        if child in kept:
            continue
        if kept.isdisjoint(child.modules()):
            setattr(module, name, None)
        else:
            _drop_all_but(child, kept)
