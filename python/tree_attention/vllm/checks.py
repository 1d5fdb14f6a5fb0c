# SPDX-License-Identifier: BSD-3-Clause
"""Checks that refuse releases of vLLM and options that the plug-in does not support."""

import importlib
import inspect
import os
from collections.abc import Callable
from typing import Any

from .._environment import VariableError

VARIABLE = "TREE_ATTENTION_VLLM"
CASCADE_VARIABLE = "TREE_ATTENTION_VLLM_CASCADE"
PLUG_IN = "the tree_attention plug-in of vLLM"
TESTED = ("0.32.0",)

_INTERFACE = "vllm.v1.attention.backend"
# The parameters with which vLLM calls what `backend` has in its place: "class.method".
CALLED = {
    "AttentionImpl.__init__": (
        "self num_heads head_size scale num_kv_heads alibi_slopes sliding_window kv_cache_dtype "
        "logits_soft_cap attn_type kv_sharing_target_layer_name"
    ),
    "AttentionImpl.forward": (
        "self layer query key value kv_cache attn_metadata output output_scale output_block_scale"
    ),
    "AttentionMetadataBuilder.__init__": "self kv_cache_spec layer_names vllm_config device",
    "AttentionMetadataBuilder.build": "self common_prefix_len common_attn_metadata fast_build",
    "AttentionBackend.supported_kv_cache_layouts": "",
}


def is_asked_for() -> bool:
    """True if TREE_ATTENTION_VLLM is 1, and VariableError unless it is 1, 0, empty or unset."""
    return _switch(VARIABLE, "0")


def is_cascade() -> bool:
    """True unless TREE_ATTENTION_VLLM_CASCADE is 0, and VariableError as of `is_asked_for`."""
    return _switch(CASCADE_VARIABLE, "1")


def _switch(name: str, default: str) -> bool:
    value = os.environ.get(name) or default
    if value not in ("0", "1"):
        raise VariableError(name, "1, 0 or unset")
    return value == "1"


def check_engine() -> None:
    """Warns if this vLLM was not tested; RuntimeError if it lacks a function the plug-in uses."""
    import vllm
    from vllm.logger import init_logger
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        raise RuntimeError(
            f"{PLUG_IN} is an attention for CPUs, but this vLLM runs on "
            f"{current_platform.device_type!r}: unset {VARIABLE}"
        )
    faults = [fault for name in CALLED for fault in faults_of(_INTERFACE, name, CALLED[name])]
    try:
        importlib.import_module(f"{__package__}.backend")
    except (ImportError, AttributeError) as error:
        faults.append(str(error))
    if faults:
        raise RuntimeError(
            f"{PLUG_IN} is tested with {', '.join(TESTED)}, and {vllm.__version__} differs: "
            f"{'; '.join(faults)}"
        )
    if vllm.__version__.split("+")[0] not in TESTED:
        tested = ", ".join(TESTED)
        init_logger("vllm.tree_attention").warning(
            "%s is tested with %s, and this is %s", PLUG_IN, tested, vllm.__version__
        )


def faults_of(module: str, name: str, parameters: str) -> list[str]:
    """The differences of the function `module.name` from one with these parameters."""
    try:
        function: Callable[..., object] = importlib.import_module(module)  # type: ignore[assignment]
        for part in name.split("."):
            function = getattr(function, part)
    except (ImportError, AttributeError):
        return [f"there is no {name} in {module}"]
    found = " ".join(inspect.signature(function).parameters)
    return [] if found == parameters else [f"{name} has the parameters ({found})"]


def check_drafts(config: Any) -> None:
    """Raises ValueError where vLLM gives drafts slots that know no context parallelism."""
    drafts = config.speculative_config
    if drafts is None:
        return
    guesses_on = drafts.use_eagle() and drafts.num_speculative_tokens > 1
    if drafts.uses_draft_model() or guesses_on:
        raise ValueError(
            f"{PLUG_IN}: --decode-context-parallel-size is not supported with --speculative-config "
            f"of the method {drafts.method!r}, as vLLM writes the keys of drafts as if one process "
            "had them all; use the method 'ngram'"
        )


def check_layer(attn_type: str, kv_cache_dtype: str, config: Any) -> None:
    """Raises ValueError for a layer of the model of `config` whose attention is not supported."""
    from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype

    model_dtype = config.model_config.dtype
    if attn_type != "decoder":
        raise ValueError(
            f"{PLUG_IN}: only attention of type 'decoder' is supported, got {str(attn_type)!r}"
        )
    dtype = kv_cache_dtype_str_to_dtype(kv_cache_dtype, config.model_config)
    if dtype != model_dtype and kv_cache_dtype not in ("fp8", "fp8_e4m3"):
        raise ValueError(
            f"{PLUG_IN}: --kv-cache-dtype must be auto, fp8 or that of the model, {model_dtype}, "
            f"got {kv_cache_dtype!r}"
        )
    if getattr(config.model_config, "is_mm_prefix_lm", False):
        raise ValueError(
            f"{PLUG_IN}: models whose image tokens attend to later ones (is_mm_prefix_lm) are not "
            "supported, as attention is causal; serve text alone with --language-model-only"
        )
    window = getattr(config.model_config, "rswa_window", None)
    if window:
        raise ValueError(
            f"{PLUG_IN}: a window that also sees the whole prompt (R-SWA) is not supported, as a "
            f"query sees one range of keys, got rswa_window = {window}; serve another model"
        )
    if config.kv_transfer_config is not None:
        raise ValueError(
            f"{PLUG_IN}: --kv-transfer-config is not supported, as rows of the cache are in "
            "another order than those of vLLM's own attention"
        )
