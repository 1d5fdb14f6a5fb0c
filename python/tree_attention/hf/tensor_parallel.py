# SPDX-License-Identifier: BSD-3-Clause
"""Models whose weights are split over ranks, from a checkpoint or from memory."""

import functools
import inspect
from collections.abc import Callable
from os import PathLike
from typing import Any, Literal, get_type_hints

import torch
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel
from typing_extensions import Unpack

from .._numbers import shown
from ..exchange import DEFAULT_TIMEOUT, Signature, check_timeout, on_every_rank
from ..options import LOADING, check_option_names, lists_options
from ..planning.models import Model
from ..shares import GivenShares, is_auto
from ..weights.checkpoint.files import Source
from ..weights.digests import digest_parameters
from ..weights.experts import choose_experts
from ..weights.load import (
    DIGEST,
    Loading,
    check_weights,
    device_of,
    dtype_of,
    prepare,
    read_config,
)
from ..weights.mesh import Mesh
from ..weights.plan import WeightPlan, plan
from ..weights.split import attach, split
from ..weights.text import text_of
from ..weights.whole import check_model
from .auto_shares import choose, measured_group, shape_in
from .enable import check_enable, disable, enable, refuse_both
from .options import EnableOptions
from .patch import is_enabled

_PARAMETERS = inspect.signature(enable).parameters
_OF_ENABLE = {name: _PARAMETERS[name].default for name in get_type_hints(EnableOptions)}


@lists_options(EnableOptions, _OF_ENABLE)
def from_pretrained(
    path: str | PathLike[str],
    *,
    group: ProcessGroup | None = None,
    tensor_parallel_size: int = 1,
    shares: GivenShares = None,
    dtype: torch.dtype | Literal["auto", "float32", "bfloat16", "float16"] | None = None,
    device: torch.device | str | None = None,
    weights: Literal["int8", "int4"] | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    attn_implementation: Literal["tree_attention"] = "tree_attention",
    **enable_options: Unpack[EnableOptions],
) -> PreTrainedModel:
    """Loads a checkpoint whose weights are split over the ranks of a group, and enables it.

    Equivalent, with the unsplit weights in memory for a while::

        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval().to(device)
        enable(parallelize(model, group=group, tensor_parallel_size=...), **enable_options)

    Collective. Each rank reads its parts alone: it needs memory for these and one more tensor, and
    all ranks raise before they allocate any where one certainly has too little.
    Weights that are published in blocks of FP8 or in MXFP4 become numbers of `dtype`. Of a
    checkpoint of text and images the text is read alone.

    Args:
        path: a directory with config.json and safetensors files, or a name on the Hugging Face Hub.
            What looks like a path, as `models/llama` where there is a directory models, is not
            asked of the Hub.
        group, tensor_parallel_size, shares: see `parallelize`; shares not together with layout.
        dtype: dtype of the weights, or its name; None, the default, and "auto" are the
            checkpoint's.
        device: where the weights go, by default the CPU.
        weights: "int8" or "int4" quantises linear layers and experts while they are read, and
            activations stay as they are: int8 with a scale for each output, int4 with one for each
            128 inputs of an output, both symmetric. The embedding, the head, norms and routers keep
            their dtype. On the CPU. None, the default, quantises nothing.
        token: the Hub asks for one before it gives out models with restricted access. None takes
            the token of `hf auth login`, and True requires one.
        revision: branch, tag or commit on the Hub, by default main.
        attn_implementation: always "tree_attention".
        timeout: see `enable`; also the longest that a rank waits for others to have loaded theirs.
        Everything else: see `enable`.

    Returns:
        The model in eval mode.

    Raises:
        TypeError, ValueError: an argument is out of range or unknown, in which case the error names
            the one with its meaning; the model cannot be enabled or split; or a file is damaged,
            lacks weights or contradicts config.json.
        OSError: the directory or a file is missing.
        torch.OutOfMemoryError: the weights of a rank, or of the ranks of one host, do not fit.
        ExchangeError: another rank raised one of these, was lost, or has another checkpoint, dtype
            or weights.

    For example::

        from tree_attention import hf

        # One process; with several, after torch.distributed.init_process_group, each rank loads
        # its own part.
        model = hf.from_pretrained("examples/passkey-llama")
        print(hf.mesh(model).tensor_parallel_size, model.config.model_type)  # 1 llama

    Source: Helix parallelism (arXiv:2507.07120).
    """
    timeout = check_timeout("from_pretrained", enable_options.get("timeout", DEFAULT_TIMEOUT))
    names = inspect.signature(from_pretrained).parameters
    check_option_names("from_pretrained", enable_options, names, LOADING)
    refuse_both("from_pretrained", shares, enable_options.get("layout"))
    mesh = Mesh(group, tensor_parallel_size, timeout, "from_pretrained", shares)
    if is_auto(shares):

        def shape() -> Model:
            config, checkpoint = read_config(Source.of(path, token, revision))
            stored: Any = config.dtype or checkpoint.dtype
            check_weights(weights, device_of(device))
            kv_dtype = enable_options.get("kv_dtype")
            return shape_in(config, dtype_of(dtype) or stored, weights, kv_dtype)

        place, context = device_of(device), enable_options.get("max_length")
        _measure(mesh, shape, place, timeout, context)

    def examine() -> tuple[Signature, Loading]:
        if attn_implementation != "tree_attention":
            raise ValueError(
                "from_pretrained: attn_implementation must be 'tree_attention', got "
                f"{shown(attn_implementation)}; AutoModelForCausalLM.from_pretrained loads models "
                "with others"
            )
        source = Source.of(path, token, revision)
        place = device_of(device)
        number_type = dtype_of(dtype)
        check_weights(weights, place)

        def check(model: PreTrainedModel) -> None:
            check_enable(model, mesh, **enable_options)

        with torch.device("cpu"):  # whatever the caller's default is
            found = prepare(source, mesh, number_type, place, weights, check)
        return found.signature, found

    def load() -> tuple[tuple[()], PreTrainedModel]:
        with torch.device("cpu"):
            return (), loading.load()

    loading, notes = on_every_rank("from_pretrained", mesh.calls, timeout, examine, Loading.note)
    loading.check_room(notes)
    model, _ = on_every_rank("from_pretrained", mesh.calls, timeout, load)
    return enable(model, **enable_options)


def parallelize(
    model: PreTrainedModel,
    *,
    group: ProcessGroup | None = None,
    tensor_parallel_size: int = 1,
    shares: GivenShares = None,
) -> PreTrainedModel:
    """Splits the weights of a model in memory over the ranks of a group, in place.

    Collective: every rank has the same whole model before, and its parts of it afterwards. World
    size is tensor_parallel_size times the size of a context group. Heads of queries, keys and
    values are split inside a tensor group, whose ranks are consecutive, and the slots of the cache
    over a context group; o_proj, MLPs, each expert along its inner width, the embedding and lm_head
    over all ranks. A forward pass exchanges partial states of attention once a layer, and sums
    twice. Norms, routers, projections into latents, and layers with a state stay whole. Call
    `enable(model)` afterwards, which takes its groups from here.

    Args:
        group: process group, by default the world.
        tensor_parallel_size: number of ranks in a tensor group; divides the world size and the
            number of heads of keys and values, or of queries where heads share latents.
        shares: for ranks of unequal speed or memory, one integer from 0 to 1,024 for each rank of
            the group, equal in each tensor group: how much it gets of the weights that all ranks
            split, and with `enable` of the cache. [3, 1] gives the first of two ranks three
            quarters. A mapping has a list for "weights" and one for "cache"; if one is left out,
            that is split evenly. "auto" measures on every rank for 0.4 s how fast it reads,
            multiplies and does the rest of a layer, or takes what `tree_attention calibrate`
            measured, and gives each the share with which a token takes the least time, as far as
            memory goes; equal ones, if that is within 5 %. A rank with 0 runs, and holds what every
            rank has whole. Sums have other parts then, so that logits depend on the shares in their
            last bits, the same on all ranks. None: equal ones.

    Returns:
        `model` itself, in eval mode, its attention `"tree_attention"`.

    Raises:
        TypeError: the model is none of transformers, or tensor_parallel_size or a share is no
            integer.
        ValueError: tensor_parallel_size or shares are out of range, or the model cannot be, or is,
            split.
        ExchangeError: a rank was lost, or ranks have other models or sizes.

    For example::

        from transformers import AutoModelForCausalLM
        from tree_attention import hf

        model = AutoModelForCausalLM.from_pretrained("examples/passkey-llama")  # on every rank
        model = hf.enable(hf.parallelize(model))
        print(model.config._attn_implementation)  # tree_attention

    Source: Helix parallelism (arXiv:2507.07120).
    """
    if check_model("parallelize", model) is not None:
        raise ValueError(f"parallelize: this {type(model).__name__} is split already")
    mesh = Mesh(group, tensor_parallel_size, shares=shares)
    if is_auto(shares):
        held = sum(parameter.nbytes for parameter in model.parameters())
        shape = functools.partial(shape_in, model.config, model.dtype)
        _measure(mesh, shape, model.device, mesh.timeout, held=held)

    def examine() -> tuple[Signature, tuple[WeightPlan | None, str]]:
        digest = digest_parameters(model)
        made = plan(model, mesh) if mesh.world_size > 1 else None
        return ((DIGEST, digest),), (made, digest)

    (made, digest), _ = on_every_rank("parallelize", mesh.calls, mesh.timeout, examine)
    if is_enabled(model):
        disable(model)
    text_of(model).set_attn_implementation("tree_attention")
    if made is not None:
        split(model, mesh, made)
    choose_experts(model)
    attach(model.eval(), mesh, made, digest)
    return model


def _measure(
    mesh: Mesh,
    shape: Callable[[], Model],
    device: torch.device,
    timeout: float,
    max_length: int | None = None,
    held: int = 0,
) -> None:
    """Collective: gives a mesh the shares that fit the speed of its ranks."""
    if mesh.world_size > 1:
        group = measured_group(
            mesh.op,
            mesh.calls,
            shape,
            timeout=timeout,
            device=device,
            tensor_parallel_size=mesh.tensor_parallel_size,
            max_length=max_length,
            held=held,
        )
        mesh.take(choose(mesh.op, mesh.calls, group, timeout))
