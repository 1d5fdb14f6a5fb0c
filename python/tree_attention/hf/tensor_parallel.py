# SPDX-License-Identifier: BSD-3-Clause
"""Models whose weights are split over ranks, from a checkpoint or from memory."""

import inspect
import re
from collections.abc import Mapping
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from typing_extensions import Unpack

from .._json import read_json_object
from ..exchange import DEFAULT_TIMEOUT, Signature, check_timeout, on_every_rank
from ..options import lists_options
from .checks.fingerprint import digest_parameters, digest_tensors
from .enable import check_model, disable, enable, is_enabled
from .options import EnableOptions
from .weights.checkpoint.files import check_config_file, find_file, others
from .weights.checkpoint.reading import Checkpoint
from .weights.experts import choose_experts, quantise_experts
from .weights.mesh import Mesh
from .weights.parts import Lazy, part_of
from .weights.plan import WeightPlan, plan
from .weights.quantised import SCHEMES, Matrix, quantise_linear
from .weights.split import attach, mesh_of, set_tensor, split

_DIGEST = "digest of the whole weights"
_OF_ENABLE = inspect.signature(enable)


@lists_options(EnableOptions, {name: x.default for name, x in _OF_ENABLE.parameters.items()})
def from_pretrained(
    path: str | Path,
    *,
    group: ProcessGroup | None = None,
    tensor_parallel_size: int = 1,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    weights: str | None = None,
    **enable_options: Unpack[EnableOptions],
) -> PreTrainedModel:
    """Loads a checkpoint whose weights are split over the ranks of a group, and enables it.

    Equivalent, with the whole weights in memory for a while::

        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval().to(device)
        enable(parallelize(model, group=group, tensor_parallel_size=...), **enable_options)

    Collective. Each rank reads its parts alone: it needs memory for these and one more tensor.
    Weights that are published in blocks of FP8 or in MXFP4 become numbers of `dtype`. Of a
    checkpoint of text and images the text is taken, where transformers has a model of it alone.

    Args:
        path: a directory with config.json and safetensors files, or a name on the Hugging Face Hub.
        group, tensor_parallel_size: see `parallelize`.
        dtype: dtype of the weights, by default the checkpoint's.
        device: where the weights go, by default the CPU.
        weights: "int8" or "int4" quantises linear layers and experts while they are read, and
            activations stay as they are: int8 with a scale for each output, int4 with one for each
            128 inputs of an output, both symmetric. The embedding, the head, norms and routers keep
            their dtype. On the CPU. None, the default, quantises nothing.
        timeout: see `enable`; also the longest that a rank waits for others to have loaded theirs.
        layout, prefill, prefill_chunk_size, synchronize_logits, kv_dtype, max_length, strategy,
            deterministic: see `enable`.

    Returns:
        The model in eval mode.

    Raises:
        TypeError, ValueError: an argument is out of range, the model cannot be split, or a file is
            damaged, lacks weights or contradicts config.json.
        OSError: a file is missing.
        ExchangeError: another rank raised one of these, was lost, or has another checkpoint, dtype
            or weights.

    Source: Helix parallelism (arXiv:2507.07120).
    """
    timeout = check_timeout("from_pretrained", enable_options.get("timeout", DEFAULT_TIMEOUT))
    _OF_ENABLE.bind(None, **enable_options)  # TypeError for unknown names
    mesh = Mesh(group, tensor_parallel_size, timeout, op="from_pretrained")

    def load() -> tuple[Signature, PreTrainedModel]:
        place = torch.device("cpu" if device is None else device)
        _check_numbers(dtype, weights, place)
        with torch.device("cpu"):  # whatever the caller's default is
            signature, model = _load(path, mesh, dtype, place, weights)
        return (*signature, ("weights", weights), ("dtype", str(model.dtype))), model

    model, _ = on_every_rank("from_pretrained", mesh.calls, timeout, load)
    return enable(model, **enable_options)


def parallelize(
    model: PreTrainedModel, *, group: ProcessGroup | None = None, tensor_parallel_size: int = 1
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

    Returns:
        `model` itself, in eval mode, its attention `"tree_attention"`.

    Raises:
        TypeError: the model is none of transformers, or tensor_parallel_size is no integer.
        ValueError: tensor_parallel_size is out of range, or the model cannot be, or is, split.
        ExchangeError: a rank was lost, or ranks have other models or sizes.

    Source: Helix parallelism (arXiv:2507.07120).
    """
    check_model("parallelize", model)
    if mesh_of(model) is not None:
        raise ValueError(f"parallelize: this {type(model).__name__} is split already")
    mesh = Mesh(group, tensor_parallel_size)

    def examine() -> tuple[Signature, tuple[WeightPlan | None, str]]:
        digest = digest_parameters(model)
        made = plan(model, mesh) if mesh.world_size > 1 else None
        return ((_DIGEST, digest),), (made, digest)

    (made, digest), _ = on_every_rank("parallelize", mesh.calls, mesh.timeout, examine)
    if is_enabled(model):
        disable(model)
    model.set_attn_implementation("tree_attention")
    if made is not None:
        split(model, mesh, made)
    choose_experts(model)
    attach(model.eval(), mesh, made, digest)
    return model


def _check_numbers(dtype: torch.dtype | None, weights: str | None, device: torch.device) -> None:
    if not (dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point)):
        raise ValueError(
            "from_pretrained: dtype must be a floating dtype of torch, or None for the "
            f"checkpoint's, got {dtype!r}"
        )
    if weights is not None and weights not in SCHEMES:
        raise ValueError(
            f"from_pretrained: weights must be one of {', '.join(SCHEMES)} or None, got {weights!r}"
        )
    if weights is not None and device.type != "cpu":
        raise ValueError(
            f"from_pretrained: weights={weights!r} is for the CPU, got device {device}"
        )


def _load(
    path: str | Path,
    mesh: Mesh,
    dtype: torch.dtype | None,
    device: torch.device,
    weights: str | None,
) -> tuple[Signature, PreTrainedModel]:
    """The signature of the whole weights of a checkpoint, and the model with this rank's parts."""
    file = find_file(path, "config.json", required=True)
    if file is None:
        raise OSError(f"from_pretrained: {path} has no config.json{others(path)}")
    check_config_file(file, "from_pretrained: the configuration")
    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    checkpoint = Checkpoint(path, config.to_dict().get("quantization_config") or {})
    config = _text_config(path, config, checkpoint)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # of the model that is made no weight is quantised
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config,
            dtype=dtype or config.dtype or checkpoint.dtype,
            attn_implementation="tree_attention",
            trust_remote_code=False,
        )
    check_model("from_pretrained", model)
    # As transformers does: some models keep norms in float32 when the others are float16.
    for pattern, kept in model._get_dtype_plan(model.dtype).items():
        for name, parameter in model.named_parameters():
            if re.search(pattern, name):
                parameter.data = parameter.data.to(kept)
    tensors = checkpoint.tensors(model)
    digest = digest_tensors(checkpoint.files.items(), reads_all=False)
    is_split = mesh.world_size > 1
    made = plan(model, mesh) if is_split or weights is not None else WeightPlan()
    if weights is not None and not made.linears:
        raise ValueError(
            f"from_pretrained: {type(model).__name__} has no torch.nn.Linear that weights="
            f"{weights!r} could quantise; leave weights out"
        )
    if is_split:
        split(model, mesh, made)
    else:
        made.cuts.clear()
    _fill(model, tensors, made, weights, device, show=mesh.rank == 0)
    choose_experts(model)
    file = find_file(path, "generation_config.json")
    if file is not None:
        # transformers says of a damaged one that there is none.
        read_json_object(file, "from_pretrained: the defaults of generation in")
        model.generation_config = GenerationConfig.from_pretrained(path)
    model = model.to(device).eval()
    attach(model, mesh, made if is_split else None, digest, is_quantised=weights is not None)
    return ((_DIGEST, digest),), model


def _text_config(
    path: str | Path, config: PreTrainedConfig, checkpoint: Checkpoint
) -> PreTrainedConfig:
    """The configuration of the model of text in a checkpoint, whose other weights are left out."""
    text = config.get_text_config(decoder=True)
    if text is not config and not config.is_encoder_decoder:
        text.dtype = text.dtype or config.dtype
        # As transformers, which ties nothing of which the checkpoint has both.
        is_tied = any(getattr(x, "tie_word_embeddings", False) for x in (config, text))
        text.tie_word_embeddings = not checkpoint.take_text() and is_tied
        config = text
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(
            f"from_pretrained: {path} has the model_type {config.model_type!r}, for which "
            f"transformers {transformers.__version__} has no model of text with a language head "
            "(AutoModelForCausalLM); only such models are supported"
        )
    return config


def _fill(
    model: PreTrainedModel,
    tensors: Mapping[str, Lazy],
    made: WeightPlan,
    scheme: str | None,
    device: torch.device,
    show: bool,
) -> None:
    """Fills a model on the meta device with this rank's parts of `tensors`, and quantises those
    that may have fewer bits by a `scheme`, if there is one."""
    filled: dict[nn.Parameter, nn.Parameter] = {}  # by those on the meta device
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    errors = Console(stderr=True)
    is_shown = show and errors.is_terminal
    for name in track(names, "weights", console=errors, transient=True, disable=not is_shown):
        old = model.get_parameter(name)
        if old not in filled:
            path, _, own = name.rpartition(".")
            module, source, cut = model.get_submodule(path), tensors[name], made.cuts.get(name)
            if scheme is None or name not in made.linears | made.experts:
                part = part_of(source, cut, old.dtype, device)
                filled[old] = nn.Parameter(part, requires_grad=False)
            elif isinstance(module, nn.Linear):
                filled[old] = quantise_linear(module, Matrix(source, cut), scheme, old.dtype)
            else:
                filled[old] = quantise_experts(module, own, source, cut, scheme, old.dtype)
        set_tensor(model, name, filled[old])
    for parameter in model.parameters():  # with the scales of quantised ones
        _mark(parameter)
    for name, buffer in list(model.named_buffers()):
        if buffer.is_meta:
            value = torch.empty_like(buffer, device=device)
            if name in tensors:
                _mark(value.copy_(tensors[name].whole()))
            set_tensor(model, name, value)
    model.init_weights()  # of what is not marked: buffers that are computed


def _mark(x: Tensor) -> None:
    """Marks `x` as filled, so that transformers leaves its values as they are."""
    x._is_hf_initialized = True  # type: ignore[attr-defined]
