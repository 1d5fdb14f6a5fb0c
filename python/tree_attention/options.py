# SPDX-License-Identifier: BSD-3-Clause
"""Keyword arguments that several functions have in common, each set from one typed dictionary."""

import difflib
import hashlib
import inspect
import re
from collections.abc import (
    Callable,
    Collection,
    Container,
    Mapping,
    MutableMapping,
    Sequence,
)
from typing import Any, NamedTuple, TypedDict, TypeVar, get_type_hints

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ._loader import load
from ._numbers import MAX_INTEGER, as_integers, integer, real, shown

load()  # registers the operator whose defaults these options have
_Function = TypeVar("_Function", bound=Callable[..., object])


def lists_options(
    kind: type, defaults: Mapping[str, object], described: type | None = None
) -> Callable[[_Function], _Function]:
    """Lists a typed dictionary's keys in the signature that `help` and `inspect` show, and in the
    documentation what `described`, by default the same dictionary, says of them."""
    of = described or kind
    _, _, texts = inspect.cleandoc(of.__doc__ or "").partition("Args:\n")
    shared = [
        inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, annotation=hint, default=defaults[n])
        for n, hint in get_type_hints(kind).items()
    ]

    def decorate(function: _Function) -> _Function:
        shown: Any = function
        signature = inspect.signature(function)
        *own, _ = signature.parameters.values()  # the last is **options
        shown.__signature__ = signature.replace(parameters=[*own, *shared])
        if texts and function.__doc__:
            shown.__doc__ = f"{inspect.cleandoc(function.__doc__)}\n\n{of.__name__}:\n{texts}"
        return function

    return decorate


def split_options(options: Mapping[str, object], names: Container[str]) -> tuple[Any, Any]:
    """Two dictionaries: the options that have one of the names, and the others."""
    named = {name: value for name, value in options.items() if name in names}
    return named, {name: value for name, value in options.items() if name not in names}


class AttentionOptions(TypedDict, total=False):
    """The keyword arguments that `lean_decode`, `tree_decode` and the rings have in common.

    Args:
        softmax_scale: factor of the scores; default `head_dim ** -0.5`.
        softcap: 0 is off, the default; else scores become `softcap * tanh(score / softcap)`.
        alibi_slopes: float32 `[num_heads_q]`: adds `-slope * (query_position - key_position)` to
            scores.
        query_positions: int64 `[batch, seqlen_q]`, required with `alibi_slopes`.
        key_layout: `(first, block, stride)`, default `(0, 1, 1)`: local key j is at position
            `first + (j // block) * stride + j % block`. `ShardLayout.key_layout` gives a shard's.
        page_table: int32 `[batch, pages]` or `[batch, num_heads_kv, pages]`; `key_ranges` then
            index the concatenated pages. Entries that no range reaches are never read.
        k_scale: float32 `[batch, num_heads_kv, seqlen_k]`, with pages `[num_pages, num_heads_kv,
            page_size]`, for keys of 8 bits: what each token's is multiplied by. Required for int8,
            default 1 for float8_e4m3fn, and given together with `v_scale`.
        v_scale: likewise for values.
        num_workers: 0, the default, is one to eight workers per thread, the more the more keys
            there are, or one per resident block of a GPU. A fixed number splits the keys in the
            same way, and so gives the same bits, on any number of threads. With -1, on the CPU, no
            two workers share the keys of a sequence and head: its bits do not depend on the rest
            of the batch either.
    """

    softmax_scale: float | None
    softcap: float
    alibi_slopes: Tensor | None
    query_positions: Tensor | None
    key_layout: Sequence[int]
    page_table: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    num_workers: int


_MAX_WORKERS = (1 << 31) - 1
_CLOSE = 0.75  # difflib's ratio of two names from which one may be a slip of the other
# Arguments that callers know from other libraries, with the hint for each, by kind of function.
# An argument that the function has is not looked up here.
_HUB = "give the directory that huggingface_hub.snapshot_download, which has it, returns"
_TRANSFORMERS = "transformers has it: load the model with that, and call parallelize(model)"
_READ_ANYHOW = "leave it out: each rank reads its parts of safetensors files, and nothing else"
ATTENTION, LOADING, CACHE, MERGE = "attention", "loading", "cache", "merge"
_OF_CACHES = {
    "kv_dtype has its meaning": ("kv_cache_dtype", "cache_dtype"),
    "max_length has its meaning": ("max_cache_len", "max_model_len", "max_seq_len"),
    "leave it out: the cache is split over the ranks of group": (
        *(
            "context_parallel_size",
            "decode_context_parallel_size",
            "cp_size",
            "dcp_size",
            "cp_plan",
        ),
        *("world_size", "num_ranks", "ranks"),
    ),
}
_ELSEWHERE: dict[str, dict[str, tuple[str, ...]]] = {
    ATTENTION: {
        "key_ranges has its meaning": (
            *("causal", "is_causal", "window_size", "cache_seqlens", "cu_seqlens_k"),
            *("attn_mask", "attention_mask", "mask"),
        ),
        "page_table has its meaning": ("block_table", "block_tables"),
        "softmax_scale has its meaning": ("scale", "sm_scale", "scaling"),
        "leave it out: o and lse are always returned": (
            *("return_lse", "return_softmax_lse", "return_attn_probs"),
        ),
        "leave it out: heads of keys may be fewer than heads of queries": ("enable_gqa",),
    },
    CACHE: _OF_CACHES
    | {
        "from_pretrained and parallelize have it": ("tensor_parallel_size", "tp_size", "tp_plan"),
    },
    LOADING: _OF_CACHES
    | {
        "dtype has its meaning": ("torch_dtype",),
        "device has its meaning, one for each rank": ("device_map", "max_memory"),
        'weights="int8" has its meaning': ("load_in_8bit",),
        'weights="int4" has its meaning': ("load_in_4bit",),
        'weights="int8" or "int4" quantises while it reads; what a checkpoint in blocks of FP8 or '
        "in MXFP4 has is read without it": ("quantization_config", "quantization"),
        "tensor_parallel_size has its meaning": ("tp_plan", "tp_size", "tp", "distributed_config"),
        "token has its meaning": ("use_auth_token",),
        'leave it out, or give attn_implementation="tree_attention"': (
            *("use_flash_attention_2", "_attn_implementation"),
        ),
        "leave it out: models of transformers alone are loaded, and no code of a checkpoint runs": (
            *("trust_remote_code", "code_revision"),
        ),
        _READ_ANYHOW: (
            *("low_cpu_mem_usage", "use_safetensors", "offload_folder", "offload_state_dict"),
            *("weights_only", "offload_buffers"),
        ),
        "set HF_HUB_CACHE in the environment, which has its meaning": ("cache_dir",),
        "set HF_HUB_OFFLINE=1 in the environment, which has its meaning": ("local_files_only",),
        _HUB: ("force_download", "proxies", "resume_download", "mirror"),
        _TRANSFORMERS: (
            *("config", "variant", "subfolder", "gguf_file", "key_mapping", "adapter_kwargs"),
            *("output_loading_info", "state_dict", "ignore_mismatched_sizes", "use_kernels"),
            *("from_tf", "from_flax", "output_attentions", "output_hidden_states", "use_cache"),
            *("rope_scaling", "rope_parameters", "max_position_embeddings"),
        ),
    },
    MERGE: {},
}
_OPTION_NAMES = frozenset(AttentionOptions.__annotations__)
_schema = torch.ops.tree_attention.lean_decode.default._schema
_options = [argument for argument in _schema.arguments if argument.name in _OPTION_NAMES]
TENSOR_OPTIONS = tuple(x.name for x in _options if str(x.type) == "Optional[Tensor]")
ATTENTION_DEFAULTS = {x.name: x.default_value for x in _options}
# The options as a schema declares them, which operators of graphs repeat: each "type name=default"
# after the star of the schema, where a default may be a list.
_declared = str(_schema).partition("*, ")[2].rpartition(") -> ")[0]
ATTENTION_SCHEMA = ", ".join(
    text
    for text in re.split(r", (?=\S+ \w+=)", _declared)
    if text.partition("=")[0].split()[1] in _OPTION_NAMES
)
takes_attention_options = lists_options(AttentionOptions, ATTENTION_DEFAULTS)

SEQUENCE, HEAD, KEY_HEAD, SEQUENCE_OR_PAGE = "sequence", "head", "key head", "sequence or page"


class Argument(NamedTuple):
    """An argument of `lean_decode`, as the ranks of one call share it."""

    # Its first axes. A tensor that has fewer of them lacks the axis of key heads.
    axes: tuple[str, ...] = ()
    is_compared: bool = False  # as a field of the call: a number, or the digest of a tensor
    is_of_queries: bool = False  # its values are compared with every message
    is_of_keys: bool = False  # belongs to a rank's keys, and differs by rank as they do


ARGUMENTS = {
    "q": Argument((SEQUENCE, HEAD), is_of_queries=True),
    "k": Argument((SEQUENCE_OR_PAGE, KEY_HEAD), is_of_keys=True),
    "v": Argument((SEQUENCE_OR_PAGE, KEY_HEAD), is_of_keys=True),
    "key_ranges": Argument((SEQUENCE,), is_of_keys=True),
    "softmax_scale": Argument(is_compared=True),
    "softcap": Argument(is_compared=True),
    "alibi_slopes": Argument((HEAD,), is_compared=True),
    "query_positions": Argument((SEQUENCE,), is_of_queries=True),
    "key_layout": Argument(is_of_keys=True),
    "page_table": Argument((SEQUENCE, KEY_HEAD, "page of the list"), is_of_keys=True),
    "k_scale": Argument((SEQUENCE_OR_PAGE, KEY_HEAD, "key"), is_of_keys=True),
    "v_scale": Argument((SEQUENCE_OR_PAGE, KEY_HEAD, "key"), is_of_keys=True),
    "num_workers": Argument(is_of_keys=True),
}
_COMPARED = [name for name, x in ARGUMENTS.items() if x.is_compared]
OF_QUERIES = [name for name, x in ARGUMENTS.items() if x.is_of_queries]


def part_of(
    arguments: Mapping[str, Any], sequences: slice, heads: slice, key_heads: slice
) -> dict[str, Any]:
    """The arguments of `lean_decode` for some sequences and heads, from the arguments for all."""
    is_paged = arguments.get("page_table") is not None
    slices = {
        SEQUENCE: sequences,
        HEAD: heads,
        KEY_HEAD: key_heads,
        SEQUENCE_OR_PAGE: slice(None) if is_paged else sequences,
    }

    part = dict(arguments)
    for name, x in arguments.items():
        if isinstance(x, Tensor):
            axes = ARGUMENTS[name].axes
            if x.dim() < len(axes):
                axes = tuple(axis for axis in axes if axis != KEY_HEAD)
            part[name] = x[tuple(slices[axis] for axis in axes if axis in slices)]
    return part


def check_tensors(op: str, **arguments: object) -> None:
    """Raises TypeError for an argument of `op` that is no tensor with rows in memory."""
    for name, x in arguments.items():
        if not isinstance(x, Tensor):
            way = f"; torch.as_tensor({name}) makes one" if isinstance(x, np.ndarray) else ""
            got = " ".join(repr(x).split())
            raise TypeError(f"{op}: {name} must be a tensor, got {got:.80}{way}")
        is_plain = type(x) is Tensor or type(x) is nn.Parameter
        if not (is_plain and x.layout is torch.strided) or x.is_nested or x.is_quantized:
            kind, way = _kind(name, x)
            if kind:
                raise TypeError(f"{op}: {name} must be a dense tensor, got {kind}: {way}")


def check_no_vmap(op: str, **tensors: Tensor) -> None:
    """Raises TypeError inside of `torch.vmap`, where `op` writes to memory or sends."""
    for name, x in tensors.items():
        if torch._C._functorch.is_batchedtensor(x):
            way = f"call {op} with the batch, which is its first axis"
            raise TypeError(f"{op}: {name} must not be a part that torch.vmap has made: {way}")


def check_values(op: str, names: str, *tensors: Tensor) -> None:
    """Raises ValueError for a tensor of `op` that has a shape alone; `names` are the tensors'."""
    for x in tensors:
        if x.is_meta:
            raise ValueError(f"{op}: {names} must be on a device that holds values, got meta")


# Classes of torch itself whose tensors are read as any other: while it compiles, and the result of
# a functional collective.
_READ_AS_OTHERS = ("torch._", "torch.fx", "torch.distributed._functional_collectives")


def _kind(name: str, x: Tensor) -> tuple[str, str]:
    """Names a kind of tensor that has no rows in memory, and says how to convert it; else empty."""
    kind = type(x)
    if kind.__name__ == "DTensor":
        return "a DTensor", f"give this rank's part, {name}.to_local()"
    if kind.__name__ == "MaskedTensor":
        return "a MaskedTensor", f"give {name}.get_data(), and what queries see as key_ranges"
    if x.is_nested:
        dense = f"torch.nested.to_padded_tensor({name}, 0.0)"
        return "a nested tensor", f"give {dense}, and the keys of each sequence as key_ranges"
    if x.layout != torch.strided:
        return f"one of layout {x.layout}", f"give {name}.to_dense()"
    if x.is_quantized:
        return f"a quantized one ({x.dtype})", f"give {name}.dequantize()"
    # The host reads a tensor's memory, which one with operators of its own need not have. On a
    # device its operators alone do.
    is_read = kind.__module__.startswith(_READ_AS_OTHERS) or not x.is_cpu
    if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ and not is_read:
        return f"a {kind.__module__}.{kind.__name__}", "convert it to a plain tensor"
    return "", ""


def with_numbers(op: str, options: AttentionOptions) -> AttentionOptions:
    """The options with Python's own numbers, or TypeError for what is none."""
    changed: AttentionOptions = {}
    if (scale := options.get("softmax_scale")) is not None and type(scale) is not float:
        changed["softmax_scale"] = real(op, "softmax_scale", scale)
    if "softcap" in options and type(options["softcap"]) is not float:
        changed["softcap"] = real(op, "softcap", options["softcap"])
    if "num_workers" in options:
        workers = options["num_workers"]
        if type(workers) is not int or abs(workers) > MAX_INTEGER:
            changed["num_workers"] = integer(op, "num_workers", workers, -1, _MAX_WORKERS)
    if "key_layout" in options:
        layout = options["key_layout"]
        found = as_integers(layout)
        if found is None or any(abs(number) > MAX_INTEGER for number in found):
            wanted = "three integers (first, block, stride) below 2^63"
            error = TypeError if found is None else ValueError
            raise error(f"{op}: key_layout must be {wanted}, got {shown(layout)}")
        changed["key_layout"] = found
    return {**options, **changed} if changed else options


def check_option_names(
    op: str,
    options: Mapping[str, object],
    names: Collection[str] = _OPTION_NAMES,
    kind: str = ATTENTION,
) -> None:
    """Raises TypeError, as Python does, for a keyword argument that `op`, a function of a `kind`,
    does not have, and says what has its meaning."""
    for name in options:
        if name not in names:
            way = [f"; {say}" for say, known in _ELSEWHERE[kind].items() if name in known]
            near = difflib.get_close_matches(name, names, n=1, cutoff=_CLOSE)
            way += [f"; did you mean {meant}?" for meant in near if not way]
            raise TypeError(f"{op}() got an unexpected keyword argument {name!r}{''.join(way)}")


def fields_of_options(options: AttentionOptions) -> tuple[tuple[str, object], ...]:
    """Options that ranks of one call must have in common, as `(name, value)` pairs.

    As `lean_decode` took them: numbers of any library, whose own texts may have fewer digits.
    """
    fields: list[tuple[str, object]] = []
    for name in _COMPARED:
        value: Any = options.get(name, ATTENTION_DEFAULTS[name])
        if name in TENSOR_OPTIONS:
            fields.append((f"digest of {name}", _digest(value)))
        else:
            fields.append((name, None if value is None else float(value)))
    return tuple(fields)


_digests: MutableMapping[Tensor, tuple[int | None, str]] = WeakIdKeyDictionary()


def _digest(x: Tensor | None) -> str | None:
    """A digest, which is equal for tensors of equal values.

    A tensor of a GPU is read only after it was written to, because the host waits for it, and never
    while a CUDA graph is captured.
    """
    if not isinstance(x, Tensor) or x.is_meta:
        return None
    is_kept = x.device.type != "cpu" and not x.is_inference()  # which counts no versions
    version = x._version if is_kept else 0
    known, digest = _digests.get(x, (None, ""))
    if is_kept and known == version:
        return digest
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        return "not read in a capture"
    values = x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    digest = hashlib.sha256(values.tobytes()).hexdigest()[:12]
    if is_kept:
        _digests[x] = version, digest
    return digest
