# SPDX-License-Identifier: BSD-3-Clause
"""The models of sessions: whole, split over ranks with weights of any bits, and what they must say.

Whoever asks for one gets the same one each time.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

import hf_families
from hf_models import CONFIGS, OF_EXPERTS, VOCAB_SIZE
from hf_models import make_model as make_known
from quantised_numbers import numbers_of
from tree_attention import hf
from tree_attention.weights.mesh import Mesh
from tree_attention.weights.plan import plan

from .cases import made_once

NAMES: tuple[str, ...] = (
    *("llama", "mistral_window", "mistral", "gemma2", "gemma2", "gpt_oss"),
    *("deepseek", "qwen3_moe", "phi3"),
)

# An index chooses the keys of each query. MiniMax-M3 takes no padding.
CHOOSING = ("DeepSeek-V3.2", "MiniMax-M3")
UNPADDED = ("MiniMax-M3",)
_AS_KNOWN = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 16384}
NAMES += tuple(name for name in CHOOSING if hf_families.CHOOSING[name].exists)


def make_model(name: str) -> PreTrainedModel:
    """A new model, with the same weights in every process."""
    if name not in CHOOSING:
        return make_known(name)
    family = hf_families.CHOOSING[name]
    model = hf_families.make_model(replace(family, options={**family.options, **_AS_KNOWN}))
    model.set_experts_implementation("eager")  # the only one in float64
    return model


@made_once
def group(world_size: int) -> dist.ProcessGroup:
    """The first ranks. Every rank of the world asks for it, in the same order."""
    return dist.new_group(range(world_size))


@made_once
def own_group() -> dist.ProcessGroup:
    return dist.new_group([dist.get_rank()], use_local_synchronization=True)


@contextmanager
def shared_folder(world_size: int) -> Iterator[Path]:
    """An empty folder of these ranks, which is gone when all of them have left."""
    path = [tempfile.mkdtemp(prefix="adversary-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(path, src=0, group=group(world_size))
    try:
        yield Path(path[0])
        dist.barrier(group(world_size))
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(path[0], ignore_errors=True)


def split_sizes(name: str, world_size: int) -> list[int]:
    """The sizes of tensor groups that divide the world and the model's heads."""
    if name in CHOOSING:
        return hf_families.sizes_of_tensor_groups(name, world_size)
    config = CONFIGS[name]
    is_latent = hasattr(config, "kv_lora_rank")
    heads = config.num_attention_heads if is_latent else config.num_key_value_heads
    return [n for n in range(1, world_size + 1) if world_size % n == 0 and heads % n == 0]


@made_once
def whole(name: str) -> PreTrainedModel:
    return make_model(name)


@made_once
def split(
    name: str,
    world_size: int,
    tensor_parallel_size: int,
    weights: str | None = None,
    shares: tuple[int, ...] | None = None,
) -> PreTrainedModel:
    """With `shares` of its tensor groups."""
    given = None
    if shares is not None:
        given = [share for share in shares for _ in range(tensor_parallel_size)]
    model, ranks = make_model(name), group(world_size)
    if weights is None:
        if name in (*OF_EXPERTS, *CHOOSING):  # the one that is replaced
            model.set_experts_implementation("grouped_mm")
        return hf.parallelize(
            model, group=ranks, tensor_parallel_size=tensor_parallel_size, shares=given
        )
    with shared_folder(world_size) as folder:
        model.save_pretrained(folder, is_main_process=dist.get_rank() == 0)
        dist.barrier(ranks)
        return hf.from_pretrained(
            folder,
            group=ranks,
            tensor_parallel_size=tensor_parallel_size,
            weights=weights,
            shares=given,
        )


def _with_numbers(name: str, weights: str | None) -> PreTrainedModel:
    """The whole model, with the numbers that weights of fewer bits stand for."""
    model = make_model(name)
    if weights is None:
        return model
    chosen = plan(model, Mesh(own_group(), 1))
    with torch.no_grad():
        for parameter_name in (*chosen.linears, *chosen.experts):
            parameter = model.get_parameter(parameter_name)
            experts = model.get_submodule(parameter_name.rpartition(".")[0])
            each = parameter if parameter.dim() == 3 else parameter[None]
            each = each.transpose(1, 2) if getattr(experts, "is_transposed", False) else each
            for matrix in each:
                matrix.copy_(numbers_of(matrix.contiguous(), weights, torch.float32))
    return model


@made_once
def exact(name: str, weights: str | None = None) -> PreTrainedModel:
    """In transformers' own attention and float64, in one process, without a cache."""
    return _with_numbers(name, weights).double()


@made_once
def alone(name: str, weights: str | None = None) -> PreTrainedModel:
    """For caches of 8 bits, which this process has for itself."""
    return hf.enable(_with_numbers(name, weights), own_group(), prefill_chunk_size=None)
