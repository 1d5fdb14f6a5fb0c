# SPDX-License-Identifier: BSD-3-Clause
"""Tiny models in the names and the format with which large ones are published: FP8 in blocks."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from hf_families import CHOOSING, WORKING, make_model


def write(path: Path, tensors: dict[str, Tensor], quantization: dict[str, object]) -> None:
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config.pop("quantization_config", None)
    if quantization:
        config["quantization_config"] = quantization
    (path / "config.json").write_text(json.dumps(config))


# Linear layers that are published in FP8: all but the weights of the heads of an index, routers,
# the embedding and its head, and encoders of images.
_IN_FP8 = re.compile(r"(?<!weights_)proj(_with_mqa)?\.weight|\.w[123]\.weight|\.(wq_b|wk)\.weight")
_NOT_IN_FP8 = re.compile(r"vision|projector|merge")


def publish_fp8(path: Path, model: Any = None, **more: Tensor) -> None:
    """Write DeepSeek-V3, or another model, as it is published: all linear layers and experts in
    blocks of FP8."""
    model = model or make_model(WORKING["DeepSeek-V3"])
    model.save_pretrained(path)
    tensors = {}
    for name, x in (load_file(path / "model.safetensors") | more).items():
        if x.dim() == 2 and _IN_FP8.search(name) and not _NOT_IN_FP8.search(name):
            tensors[name] = (x * 20).to(torch.float8_e4m3fn)
            blocks = (-(-x.shape[0] // 32), -(-x.shape[1] // 32))
            tensors[f"{name}_scale_inv"] = (torch.rand(blocks) + 0.5) / 20
        else:
            tensors[name] = x
    write(path, tensors, {"quant_method": "fp8", "weight_block_size": [32, 32]})


def _made(name: str, sizes: dict[str, Any]) -> Any:
    family = CHOOSING[name]
    return make_model(replace(family, options=family.options | sizes))


def publish_deepseek_v32(path: Path, **sizes: Any) -> None:
    """With the layer that predicts a second token, which models of text leave out."""
    more = {
        "model.layers.61.eh_proj.weight": torch.ones(64, 128),
        "model.layers.61.self_attn.indexer.wk.weight": torch.ones(16, 64),
        "model.layers.61.shared_head.norm.weight": torch.ones(64),
    }
    publish_fp8(path, _made("DeepSeek-V3.2", sizes), **more)


def publish_minimax_m3(path: Path, **sizes: Any) -> None:
    """The whole model, with an encoder of images and the layers that predict further tokens."""
    text = _made("MiniMax-M3", sizes)
    images = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    images |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    config = transformers.MiniMaxM3VLConfig(
        text_config=text.config.to_dict(), vision_config=images, projector_hidden_size=64
    )
    model = transformers.MiniMaxM3SparseForConditionalGeneration(config)
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.lm_head.load_state_dict(text.lm_head.state_dict())
    publish_fp8(path, model, **{"mtp.layers.0.eh_proj.weight": torch.ones(64, 128)})
    names = load_file(path / "model.safetensors")
    assert "language_model.model.layers.1.block_sparse_moe.experts.3.w2.weight" in names
    assert "language_model.model.layers.1.self_attn.index_q_proj.weight_scale_inv" in names
