# SPDX-License-Identifier: BSD-3-Clause
"""Loading a checkpoint: each rank makes a model with its parts of the weights, and no other."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from .._json import read_json_object
from .._memory import is_out_of_memory
from .._numbers import shown
from ..exchange import Note, Signature, sentence
from .checkpoint.files import Source, check_config_file, find_file, others
from .checkpoint.reading import Checkpoint
from .digests import digest_tensors
from .experts import choose_experts, quantise_experts
from .mesh import Mesh
from .parts import Lazy, part_of
from .plan import WeightPlan, plan
from .quantised import SCHEMES, Matrix, quantise_linear
from .room import check_room, note_of_room
from .split import attach, set_tensor, split
from .text import dropped_names, has_whole_class, model_of_text, text_config, text_of
from .whole import check_model

# The field by which ranks compare the weights that they have.
DIGEST = "digest of all weights"
# Dtypes of weights by the names that callers of `from_pretrained` may give.
_DTYPES = {
    "auto": None,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def dtype_of(dtype: object) -> torch.dtype | None:
    """The dtype that callers of `from_pretrained` name; None: the checkpoint's."""
    found = _DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype
    if not (found is None or (isinstance(found, torch.dtype) and found in _DTYPES.values())):
        raise ValueError(
            f"from_pretrained: dtype must be one of {', '.join(_DTYPES)}, as a name or of torch, "
            f"or None for the checkpoint's, got {shown(dtype)}"
        )
    return found


def device_of(device: torch.device | str | None) -> torch.device:
    """The device that callers of `from_pretrained` name; None: the CPU."""
    with suppress(RuntimeError):  # of torch, which knows no such name
        found = torch.device("cpu" if device is None else device)
        if found.type in ("cpu", "cuda"):
            return found
    raise ValueError(
        f"from_pretrained: device must be a CPU or CUDA device, such as 'cpu', got {shown(device)}"
    )


def check_weights(weights: str | None, device: torch.device) -> None:
    if weights is not None and weights not in SCHEMES:
        raise ValueError(
            f"from_pretrained: weights must be one of {', '.join(SCHEMES)} or None, got {weights!r}"
        )
    if weights is not None and device.type != "cpu":
        raise ValueError(
            f"from_pretrained: weights={weights!r} is for the CPU, got device {device}"
        )


@dataclass(frozen=True)
class Loading:
    """A model on the meta device, cut into this rank's parts, and what will fill it."""

    model: Any  # a PreTrainedModel
    mesh: Mesh
    made: WeightPlan
    tensors: Mapping[str, Lazy]
    digest: str
    device: torch.device
    weights: str | None

    @property
    def signature(self) -> Signature:
        """The fields by which ranks compare what they load."""
        kind = ("weights", self.weights), ("dtype", str(self.model.dtype))
        return ((DIGEST, self.digest), *kind)

    def note(self) -> Note:
        """The sizes by which `check_room` of every rank decides."""
        return note_of_room(self.model, self.made, self.weights, self.device)

    def check_room(self, notes: list[Note]) -> None:
        """Raises torch.OutOfMemoryError on every rank where one certainly has no room."""
        check_room(self.mesh, notes, self.model, self.weights, self.device)

    def load(self) -> PreTrainedModel:
        """The model with this rank's weights."""
        is_first, is_split = self.mesh.rank == 0, self.mesh.world_size > 1
        _fill(self.model, self.tensors, self.made, self.weights, self.device, show=is_first)
        choose_experts(self.model)
        model: PreTrainedModel = self.model.to(self.device).eval()
        made = self.made if is_split else None
        attach(model, self.mesh, made, self.digest, is_quantised=self.weights is not None)
        return model


def prepare(
    source: Source,
    mesh: Mesh,
    dtype: torch.dtype | None,
    device: torch.device,
    weights: str | None,
    check: Callable[[PreTrainedModel], object],
) -> Loading:
    """The loading of this rank's parts of a checkpoint; `check` is called with the whole model on
    the meta device. No weights are read yet, and no memory is taken."""
    config, checkpoint = read_config(source)
    with torch.device("meta"), _configuration_named(source):
        model: Any = model_of_text(
            config,
            dtype=dtype or config.dtype or checkpoint.dtype,
            attn_implementation="tree_attention",
            trust_remote_code=False,
        )
    check_model("from_pretrained", model)
    checkpoint.leave_out(dropped_names(model))
    check(model)
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
    file = find_file(source, "generation_config.json")
    if file is not None:
        # transformers says of a damaged one that there is none.
        read_json_object(file, "from_pretrained: the defaults of generation in")
        model.generation_config = GenerationConfig.from_pretrained(source.path, **source.of_hub)
    return Loading(model, mesh, made, tensors, digest, device, weights)


def read_config(source: Source) -> tuple[PreTrainedConfig, Checkpoint]:
    """The configuration of the model of text in a checkpoint, or of the whole where there is no
    class for the text alone, and the checkpoint's files."""
    file = find_file(source, "config.json", required=True)
    if file is None:
        raise OSError(f"from_pretrained: {source} has no config.json{others(source)}")
    check_config_file(file, "from_pretrained: the configuration")
    with _configuration_named(source):
        config = AutoConfig.from_pretrained(source.path, trust_remote_code=False, **source.of_hub)
    _check_text(source, config)
    checkpoint = Checkpoint(source, config.to_dict().get("quantization_config") or {})
    config = _text_config(config, checkpoint)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # of the model that is made no weight is quantised
    return config, checkpoint


@contextmanager
def _configuration_named(source: Source) -> Iterator[None]:
    """Turns errors that do not say of what they are, such as KeyError: 'silu2', into a ValueError
    that names the checkpoint."""
    try:
        yield
    except (ImportError, OSError, ValueError):  # sentences of transformers
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise ValueError(
            f"from_pretrained: transformers {transformers.__version__} makes no model of the "
            f"config.json of {source}: {type(error).__name__}: {sentence(error)}"
        ) from error


def _check_text(source: Source, config: PreTrainedConfig) -> None:
    """Raises ValueError unless a checkpoint has a model of text that transformers can make."""
    if config.is_encoder_decoder:
        raise ValueError(
            f"from_pretrained: {source} has the model_type {config.model_type!r}, an encoder with "
            "a decoder; only decoders are supported"
        )
    text = text_config(config)
    if type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING and not has_whole_class(config):
        raise ValueError(
            f"from_pretrained: {source} has the model_type {text.model_type!r}, for which "
            f"transformers {transformers.__version__} has no model of text with a language head "
            "(AutoModelForCausalLM); only such models are supported"
        )


def _text_config(config: PreTrainedConfig, checkpoint: Checkpoint) -> PreTrainedConfig:
    """The configuration of the model of text in a checkpoint, whose other weights are left out."""
    text = text_config(config)
    if type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        config.dtype = config.dtype or text.dtype
        return config
    if text is config:
        return config
    text.dtype = text.dtype or config.dtype
    # As transformers: where the checkpoint has both weights, they are not tied.
    is_tied = any(getattr(x, "tie_word_embeddings", False) for x in (config, text))
    text.tie_word_embeddings = not checkpoint.take_text(config.model_type) and is_tied
    return text


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
    text_of(model).init_weights()  # of what is not marked: buffers that are computed


def _mark(x: Tensor) -> None:
    """Marks `x` as filled, so that transformers leaves its values as they are."""
    x._is_hf_initialized = True  # type: ignore[attr-defined]
