# SPDX-License-Identifier: BSD-3-Clause
"""`enable`: plain `model.generate(...)` with the cache sharded over ranks."""

import functools
import os
import warnings
from collections.abc import Mapping
from typing import Literal

import torch.distributed as dist
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel
from typing_extensions import Unpack

from .._numbers import integer, shown
from ..exchange import Communicator, check_options, get_communicator
from ..sharding import BlockCyclic, ShardLayout
from ..shares import GivenShares, ModelShares, Shares, is_auto
from ..weights.mesh import Mesh
from ..weights.whole import check_model
from .auto_shares import auto_for_enabled
from .cache.far import check_device
from .cache.tree_cache import TreeCache
from .check_attention import check_attention
from .generate import Setup
from .options import CacheOptions, blocks_of, takes_cache_options, with_defaults
from .patch import is_enabled, patch, unpatch
from .sampling import SynchronizeLogits

_PREFILLS = ("auto", "split", "replicated")


@takes_cache_options
def enable(
    model: PreTrainedModel,
    group: ProcessGroup | Communicator | None = None,
    layout: ShardLayout | None = None,
    *,
    shares: GivenShares = None,
    prefill: Literal["auto", "split", "replicated"] = "auto",
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
        shares: for ranks of unequal speed or memory, one integer from 0 to 1,024 for each: how much
            of the cache, and of prompts that are split, it gets. [3, 1] gives the first of two
            three quarters. A mapping has a list for "cache" and one for "prompt"; if one is left
            out, that is split evenly. "auto" measures the hosts, as `parallelize` does, and is
            then given on every rank. None: the shares of the weights, if the model was split with
            some, or else the shares of `layout`, or equal ones. Not with `layout`. Shares of the
            cache alone do not help a model with replicated weights, as every rank reads all of
            these for each token: load it with `from_pretrained`.
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
        Everything else: see `CacheOptions`.

    Returns:
        `model` itself.

    Raises:
        TypeError: `model` is no model of transformers or is wrapped, or there is no such option.
        ValueError: `shares` are no such numbers, or given with `layout`; the model has no
            `generate`, its attention cannot be chosen, attention does not take its dtype or
            head_dim on its device, its layers cache anything but keys and values, latents or states
            of their own, `prefill` is "split" and the tokens of this model cannot be split, or an
            argument is out of range, or not for this model, layout or `prefill`.

    For example::

        from transformers import AutoModelForCausalLM, AutoTokenizer
        from tree_attention import hf

        path = "examples/passkey-llama"  # in a checkout of this library
        tokenizer = AutoTokenizer.from_pretrained(path)
        model = hf.enable(AutoModelForCausalLM.from_pretrained(path))  # on every rank
        inputs = tokenizer("The sky is", return_tensors="pt")
        ids = model.generate(**inputs, max_new_tokens=4, do_sample=False)
        print(ids.shape)  # torch.Size([1, 10])
    """
    mesh = check_model("enable", model)
    setup, can_split = check_enable(
        model,
        mesh,
        group,
        layout,
        shares=shares,
        prefill=prefill,
        prefill_chunk_size=prefill_chunk_size,
        synchronize_logits=synchronize_logits,
        **options,
    )
    if mesh is None:
        _warn_if_not_initialised()
    else:
        mesh.timeout = setup.shard.timeout
    patch(model, setup, splits_prompts=can_split and setup.prefill != "replicated")
    return model


def check_enable(
    model: PreTrainedModel,
    mesh: Mesh | None,
    group: ProcessGroup | Communicator | None = None,
    layout: ShardLayout | None = None,
    *,
    shares: GivenShares = None,
    prefill: Literal["auto", "split", "replicated"] = "auto",
    prefill_chunk_size: int | None = 2048,
    synchronize_logits: bool = False,
    **options: Unpack[CacheOptions],
) -> tuple[Setup, bool]:
    """Raises what `enable` does; `model` may be on the meta device. `mesh`: that splits its
    weights, or None.

    Returns:
        What the enabled model needs, and whether the tokens of its prompts can be split.
    """
    options = with_defaults("enable", options)
    if prefill_chunk_size is not None:
        prefill_chunk_size = integer("enable", "prefill_chunk_size", prefill_chunk_size, 1)
    if mesh is None:
        comm = logits_comm = get_communicator(group)
    else:
        _check_split(group, mesh, options["strategy"])
        comm, logits_comm, group = mesh.sums, mesh.calls, mesh.context_group
    place = get_communicator(group)  # which every call then uses, whatever becomes of the world
    if is_auto(shares):
        refuse_both("enable", shares, layout)
        shares = _measured_shares(model, mesh, place, options)
    layout, prompt_shares = _by_shares(layout, shares, place.world_size, mesh, options)
    new_cache = functools.partial(TreeCache, model.config, place, layout, **options)
    cache = new_cache()  # refuses now what every call of generate would refuse
    # Some ranks of several may have no GPU: `generate` then looks at all of them.
    if cache.has_far_keys and place.world_size == 1 and model.device.type != "meta":
        check_device("enable", model.device)
    chosen = _checked_prefill(prefill, cache, mesh)
    can_split = check_attention(model, mesh, cache, chosen)
    setup = Setup(
        comm,
        new_cache,
        cache.shard,
        cache.kv_dtype,
        cache.max_length,
        cache.has_far_keys,
        prefill_chunk_size,
        SynchronizeLogits(logits_comm, options["timeout"]) if synchronize_logits else None,
        chosen,
        prompt_shares,
    )
    return setup, can_split


def disable(model: PreTrainedModel) -> PreTrainedModel:
    """Undoes `enable`: gives the model back its former `generate` and attention.

    Methods that were put on the model after `enable` stay, and call those from before it.

    Raises:
        ValueError: the model is not enabled.

    For example::

        from transformers import AutoModelForCausalLM
        from tree_attention import hf

        model = hf.enable(AutoModelForCausalLM.from_pretrained("examples/passkey-llama"))
        hf.disable(model)
        print(model.config._attn_implementation)  # sdpa
    """
    if not is_enabled(model):
        raise ValueError("disable: the model is not enabled; call enable(model) first")
    unpatch(model)
    return model


def refuse_both(op: str, shares: object, layout: object) -> None:
    """Raises ValueError where a call of `op` is given shares as well as a layout."""
    if shares is not None and layout is not None:
        raise ValueError(
            f"{op}: shares and layout both say which rank keeps a token, got {shown(shares)} and "
            f"{layout}; give one of them, such as BlockCyclic(world_size, block, shares)"
        )


def _measured_shares(
    model: PreTrainedModel, mesh: Mesh | None, comm: Communicator, options: CacheOptions
) -> Mapping[str, Shares]:
    if mesh is not None:
        raise ValueError(
            "enable: shares='auto' is for models with replicated weights; give it to the function "
            "that splits the weights, from_pretrained or parallelize, and none here"
        )
    held = sum(parameter.nbytes for parameter in model.parameters())
    found = auto_for_enabled("enable", comm, model.config, model.dtype, model.device, held, options)
    return {"cache": found.cache, "prompt": found.prompt}


def _by_shares(
    layout: ShardLayout | None,
    shares: GivenShares,
    world_size: int,
    mesh: Mesh | None,
    options: CacheOptions,
) -> tuple[ShardLayout | None, Shares]:
    """The layout of caches, None for the default, and the shares of a prompt."""
    refuse_both("enable", shares, layout)
    if shares is None:
        found = ModelShares() if mesh is None else mesh.shares
    elif mesh is None:
        found = ModelShares.of("enable", shares, world_size)
    else:
        found = ModelShares.of("enable", shares, mesh.world_size, mesh.tensor_parallel_size)
    if isinstance(shares, Mapping) and "weights" in shares:
        raise ValueError(
            "enable: shares of weights are for from_pretrained and parallelize, which split them, "
            f"got {shown(shares)}"
        )
    if layout is not None:
        return layout, layout.shares if isinstance(layout, BlockCyclic) else None
    if found.cache is None:
        return None, found.prompt
    return blocks_of(options).layout(world_size, found.cache), found.prompt


def _checked_prefill(prefill: str, cache: TreeCache, mesh: Mesh | None) -> str:
    if prefill not in _PREFILLS:
        raise ValueError(f"enable: prefill must be one of {', '.join(_PREFILLS)}, got {prefill!r}")
    blocks = cache.shard.blocks
    if not (blocks.size or cache.has_far_keys):
        return prefill
    if prefill == "split":
        kind = blocks if blocks.size else "far='cpu'"
        raise ValueError(f"enable: with {kind} prefill must be 'auto' or 'replicated', got 'split'")
    if blocks.size and mesh is not None:
        raise blocks.refusal(
            "enable",
            "needs a model whose weights are whole, as the sums over parts of them depend on the "
            "number of ranks",
        )
    return "replicated"


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


def _check_split(group: ProcessGroup | Communicator | None, mesh: Mesh, strategy: str) -> None:
    if group is not None:
        raise ValueError(
            "enable: a model whose weights are split has its groups from parallelize or "
            f"from_pretrained, and group must be None, got {group!r}"
        )
    check_options("enable", strategy, head_sharded=mesh.context_size > 1)
