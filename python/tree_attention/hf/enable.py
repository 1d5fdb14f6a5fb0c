# SPDX-License-Identifier: BSD-3-Clause
"""`enable`: plain `model.generate(...)` with the cache sharded over ranks."""

import functools
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel
from typing_extensions import Unpack

from .._numbers import integer
from ..exchange import Communicator, check_options, get_communicator
from ..sharding import ShardLayout
from ..weights.mesh import Mesh
from ..weights.split import mesh_of
from ..weights.whole import check_model
from .cache.latent import check_latents, override_expansion, restore_expansion
from .cache.operands import check_keys
from .cache.tree_cache import TreeCache
from .checks.generate_checks import Preparation
from .options import CacheOptions, takes_cache_options, with_defaults
from .overrides import override, restore
from .own_attention import choose_attention, own_attentions
from .prompts.forward import checked_prefill, override_forward
from .sampling import SynchronizeLogits

_OVERRIDES: dict[str, Callable[..., Any]] = {
    "generate": Preparation.generate,
    "_prepare_model_inputs": Preparation.note_inputs,
    "_prepare_cache_for_generation": Preparation.prepare_cache,
    "get_compiled_call": Preparation.get_compiled_call,
    "prepare_inputs_for_generation": Preparation.prepare_inputs,
    "_update_model_kwargs_for_generation": Preparation.check_step,
    "_get_logits_processor": Preparation.add_processor,
}
_PREVIOUS = "_attention_before_enable"


@takes_cache_options
def enable(
    model: PreTrainedModel,
    group: ProcessGroup | Communicator | None = None,
    layout: ShardLayout | None = None,
    *,
    prefill: str = "auto",
    prefill_chunk_size: int | None = 2048,
    synchronize_logits: bool = False,
    **options: Unpack[CacheOptions],
) -> PreTrainedModel:
    """Makes `model.generate(...)` shard its key/value cache over the ranks of a group.

    Every rank calls `enable`, and then `generate` with the same inputs. The attention of the model
    becomes `"tree_attention"`. Each call of `generate` makes a `TreeCache` unless it is given one,
    and reads long prompts in chunks. Before the first step the ranks compare inputs, settings,
    processors, stopping criteria, the model and its assistant, and at the end the tokens: what
    differs, or a rank that raises, is an `ExchangeError` on the others (docs/security.md).
    `disable` undoes it; `enable` on an enabled model replaces its options.

    Args:
        group, layout: see `TreeCache`. A model whose weights are split has its groups from there:
            `group` is None, and `layout` is over its context group.
        prefill: "split" gives each rank some tokens of a prompt, and each runs the model on its
            own; "replicated" has every rank run it on all of them; "auto" splits a chunk of 64
            tokens or more for each rank. Split are forward passes over several tokens that ask for
            the logits of the last position alone. A model whose weights are split shares the work
            of a prompt anyhow: it takes "auto" and "replicated", which mean the same.
        prefill_chunk_size: number of prompt tokens that a rank computes in a forward pass, which
            bounds the memory of activations; None: the whole prompt at once, as always with layers
            that keep a state, unless they are known to go on from it with several tokens, and with
            rotary embeddings that depend on the length of the text (longrope, dynamic) or where
            `generate` is asked for hidden states. Chunks whose tokens are split are as many times
            longer as there are ranks. The argument of the same name to `generate`, the tokens of
            all ranks, takes precedence.
        synchronize_logits: the first rank sends its logits to the others at every step, for ranks
            whose hardware rounds differently. Ranks of one kind of hardware do not need it.
        kv_dtype, max_length, strategy, timeout: see `CacheOptions`.
        deterministic: see `CacheOptions`. Generation on the CPU then has the same bits on every
            number of ranks, if the rest of the model has them: with as many threads for each rank.
            Prompts are "replicated".

    Returns:
        `model` itself.

    Raises:
        TypeError: `model` is no model of transformers or is wrapped, or there is no such option.
        ValueError: the model has no `generate`, its attention cannot be chosen, attention does
            not take its dtype or head_dim on its device, its layers cache anything but keys and
            values, latents or states of their own, `prefill` is "split" and the tokens of this
            model cannot be split, `deterministic` is given with "split", split weights, or a layout
            or layers that it is not for, or an argument is out of range.
    """
    options = with_defaults("enable", options)
    if prefill_chunk_size is not None:
        prefill_chunk_size = integer("enable", "prefill_chunk_size", prefill_chunk_size, 1)
    check_model("enable", model)
    mesh = mesh_of(model)
    if mesh is None:
        comm = logits_comm = get_communicator(group)
        _warn_if_not_initialised()
    else:
        _check_split(group, mesh, options)
        comm, logits_comm, group = mesh.sums, mesh.calls, mesh.context_group
    prefill = checked_prefill(model, prefill, options["deterministic"])
    place = get_communicator(group)  # which every call then uses, whatever becomes of the world
    new_cache = functools.partial(TreeCache, model.config, place, layout, **options)
    processor = SynchronizeLogits(logits_comm, options["timeout"]) if synchronize_logits else None
    preparation = Preparation(comm, new_cache, prefill_chunk_size, processor, prefill, model)
    check_latents(model, preparation.kv_dtype)
    check_keys(model, preparation.kv_dtype, own_attentions(model))
    if is_enabled(model):  # until now, so that wrong options leave it as it was
        disable(model)
    previous = model.config._attn_implementation
    choose_attention(model, "tree_attention")
    if model.config._attn_implementation != "tree_attention":
        raise ValueError(
            f"enable: {type(model).__name__} does not let its attention be chosen "
            "(see AttentionInterface in the documentation of transformers)"
        )
    for name, replacement in _OVERRIDES.items():
        override(model, name, functools.partial(replacement, preparation))
    override_forward(model, prefill)
    override_expansion(model)
    vars(model)[_PREVIOUS] = previous
    if mesh is not None:
        mesh.timeout = preparation.shard.timeout
    return model


def disable(model: PreTrainedModel) -> PreTrainedModel:
    """Undoes `enable`: gives the model back its former `generate` and attention.

    Methods that were put on the model after `enable` stay, and call those from before it.

    Raises:
        ValueError: the model is not enabled.
    """
    if not is_enabled(model):
        raise ValueError("disable: the model is not enabled; call enable(model) first")
    for name in (*_OVERRIDES, "forward"):
        restore(model, name)
    restore_expansion(model)
    choose_attention(model, vars(model).pop(_PREVIOUS))
    return model


def is_enabled(model: PreTrainedModel) -> bool:
    """True where `enable` is in force."""
    return _PREVIOUS in vars(model)


def _warn_if_not_initialised() -> None:
    """Warns in a process that torchrun started and that has not joined the others."""
    size = os.environ.get("WORLD_SIZE", "")
    if not dist.is_initialized() and size.isdecimal() and int(size) > 1:
        _warn_once(size)


@functools.cache
def _warn_once(size: str) -> None:
    warnings.warn(
        f"enable: WORLD_SIZE is {size} and torch.distributed is not initialised, so each of these "
        "processes keeps all keys and generates by itself; call "
        "torch.distributed.init_process_group before enable",
        stacklevel=4,
    )


def _check_split(
    group: ProcessGroup | Communicator | None, mesh: Mesh, options: CacheOptions
) -> None:
    if group is not None:
        raise ValueError(
            "enable: a model whose weights are split has its groups from parallelize or "
            f"from_pretrained, and group must be None, got {group!r}"
        )
    check_options("enable", options["strategy"], head_sharded=mesh.context_size > 1)
    if options["deterministic"]:
        raise ValueError(
            "enable: deterministic needs a model whose weights are whole, as the sums over "
            "parts of them depend on the number of ranks"
        )
