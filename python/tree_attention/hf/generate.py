# SPDX-License-Identifier: BSD-3-Clause
"""`generate` of an enabled model: one function for each method of the model that is replaced.

They refuse what cannot work, compare the ranks before the first step and at the end, make the
cache, and check the steps. `REPLACEMENTS` has them by the name of the method. Each is given the
options of `enable`, the bound method that it replaces, and the model.
"""

import inspect
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList, PreTrainedModel
from transformers.generation import GenerationMode

from ..exchange import Communicator, ExchangeError, Note, Signature, sentence
from ..shares import Shares
from .cache.build import goes_on_from_states
from .cache.far import check_device
from .cache.shard import Shard
from .cache.tree_cache import TreeCache
from .cache.window import WindowLayer
from .check_attention import check_layers
from .fingerprint import describe, describe_all, model_signature, settings_of
from .masks import HOLE_BESIDE_STATES, check_steps_after, longest_hole
from .overrides import is_overridden
from .prompts.copies import num_copies, read_once
from .prompts.forward import may_be_chunked, splits_prompts, under_new_name
from .refusals import (
    CHUNKS_AFTER_CACHED_TOKENS,
    check_cached_prompt,
    check_given_cache,
    check_settings,
    unsupported_cache,
)
from .release import CACHE_NAME, generate_without_enable
from .sampling import SynchronizeLogits
from .text import check_text_alone, forget_images, others_of

# Arguments of a forward pass whose last axis runs over the tokens of the text.
_OF_TOKENS = {"position_ids", "token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids"}
# True inside a call of `generate` that ends with a check of all ranks, also in an assistant's.
_is_inside = ContextVar("_is_inside", default=False)


@dataclass
class Call:
    """A call of `generate` in progress."""

    arguments: dict[str, Any] | None = None  # as the caller gave them; None: no call
    inputs: dict[str, Tensor] = field(default_factory=dict)  # transformers', which may be others
    num_prompt: int = 0  # tokens of the prompt, or embeddings
    num_ids: int = 0  # tokens of the prompt with which the returned tokens begin
    has_whole_text: bool = True  # whether the prompt has the tokens of a given cache, too
    is_prepared: bool = False  # whether the cache is chosen and the ranks compared
    cache: TreeCache | None = None
    # Tokens that it must hold after the steps so far; None: what it holds after the first.
    length: int | None = None
    is_assisted: bool = False  # steps feed candidates, too


class _Calls(threading.local):
    def __init__(self) -> None:
        self.current = Call()


@dataclass(eq=False)
class Setup:
    """The options with which a model was enabled, and the call that each thread is in."""

    comm: Communicator  # of all ranks that run the model; a step's first exchange is on it
    new_cache: Callable[[], TreeCache]
    shard: Shard  # of the caches that it makes, like the next two
    kv_dtype: torch.dtype | None
    max_length: int | None
    has_far_keys: bool
    prefill_chunk_size: int | None
    synchronize_logits: SynchronizeLogits | None
    prefill: str
    prompt_shares: Shares  # of the tokens of prompts that are split
    calls: _Calls = field(default_factory=_Calls)


def generate(
    setup: Setup, original: Callable[..., Any], model: PreTrainedModel, *args: Any, **kwargs: Any
) -> Any:
    """The output of `generate`, if it raised on no rank and all ranks have the same tokens."""
    arguments = _by_name(original, model, args, kwargs)
    others = others_of(model)
    for comm in (setup.comm, setup.shard.comm):
        comm.check_group("enable")
    is_inside, outer = _is_inside.get(), setup.calls.current
    meets = setup.comm.world_size > 1 and not is_inside
    # Over ranks, no other thread may use the groups until it ends. Ranks may call it in threads
    # of any name, as it compares inputs and settings itself.
    with (
        setup.comm.turn("generate", name="generate"),
        setup.shard.comm.turn("generate", name="generate"),
    ):
        token = _is_inside.set(meets or is_inside)
        try:
            setup.calls.current = Call(arguments)
            if arguments.get("cache_implementation") == "paged":
                # `check_settings` comes too late: for a paged cache, transformers leaves
                # `generate` before it asks for a cache.
                raise unsupported_cache("paged")
            check_text_alone("generate", others, arguments)
            forget_images(model)
            output = original(*args, **kwargs)
        except ExchangeError:  # which the others have, too
            raise
        except Exception as error:
            if meets:
                with suppress(ExchangeError):  # the others have it from this rank
                    _meet(setup, f"end of generate by {type(error).__name__}: {sentence(error)}")
            raise
        finally:
            _is_inside.reset(token)
            setup.calls.current = outer
        if meets:
            tokens = describe(getattr(output, "sequences", output))
            # Without this: ranks return different tokens.
            _meet(setup, "end of generate", ("digest of the tokens", tokens))
        return output


def _meet(setup: Setup, op: str, *signature: tuple[str, object]) -> None:
    """Compares `op` with the call of every other rank, also of a rank that is still in a step."""
    setup.comm.agree(signature, setup.shard.timeout, op)


def note_inputs(
    setup: Setup, original: Callable[..., Any], model: PreTrainedModel, *args: Any, **kwargs: Any
) -> tuple[Tensor, str, dict[str, Any]]:
    """Notes the prompt, which a caller's own `generate` may have changed on its way."""
    inputs, name, model_kwargs = original(*args, **kwargs)
    found = {**model_kwargs, name: inputs}
    call = setup.calls.current
    call.inputs = {key: x for key, x in found.items() if isinstance(x, Tensor)}
    call.num_prompt = inputs.shape[1]
    call.num_ids = found["input_ids"].shape[1]
    mask = model_kwargs.get("attention_mask")
    call.has_whole_text = mask is None or mask.shape[1] == call.num_prompt
    return inputs, name, model_kwargs


def add_processor(
    setup: Setup, original: Callable[..., Any], model: PreTrainedModel, *args: Any, **kwargs: Any
) -> LogitsProcessorList:
    """The caller's logits processors, followed by the one that synchronises."""
    if setup.synchronize_logits is not None and setup.calls.current.arguments is not None:
        given = kwargs.get("logits_processor") or ()
        kwargs["logits_processor"] = LogitsProcessorList([*given, setup.synchronize_logits])
    processors: LogitsProcessorList = original(*args, **kwargs)
    return processors


def prepare_cache(
    setup: Setup,
    original: Callable[..., Any],
    model: PreTrainedModel,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    *others: Any,
) -> Any:
    """Puts a cache into `model_kwargs` and a chunk size into `generation_config`, which belongs
    to this call alone, and has every rank raise if the ranks differ."""
    mode, call = others[0], setup.calls.current
    arguments, cache = call.arguments, model_kwargs.get(CACHE_NAME)
    if arguments is None:
        raise RuntimeError(
            "generate: the generate that enable put on the model was left out, by one that was "
            "put there afterwards or by a call of the class's; put yours on the model before "
            "enable, or have it call the model's former generate"
        )
    check_settings(generation_config, arguments, setup.comm.world_size)
    makes_cache = cache is None and generation_config.use_cache is not False
    num_prompt, num_cached, num_left_out = call.num_prompt, 0, 0
    kv_dtype, max_length = setup.kv_dtype, setup.max_length if makes_cache else None
    has_far_keys = setup.has_far_keys
    if cache is not None:
        check_given_cache(cache, setup.shard)
        num_cached, kv_dtype = int(cache.get_seq_length()), cache.kv_dtype
        max_length, has_far_keys = cache.max_length, cache.has_far_keys
        check_cached_prompt(arguments, num_prompt, num_cached, call.has_whole_text)
        num_left_out = 0 if call.has_whole_text else num_cached
        if num_left_out > 0 and model_kwargs.get("inputs_embeds") is not None:
            raise ValueError(
                f"generate: the cache holds {num_cached} tokens and transformers takes "
                f"inputs_embeds of all tokens of the text, got {num_prompt}; pass embeddings of "
                f"all {num_left_out + num_prompt} tokens, or token ids"
            )
    mask = model_kwargs.get("attention_mask")
    follows = generation_config.max_length > call.num_ids + 1
    hole = 0
    if isinstance(mask, Tensor) and mask.dim() == 2:
        if follows:
            check_steps_after(mask, num_cached, arguments.get("attention_mask") is not None)
        hole = longest_hole(mask)
    # The slots of the prompt and of all new tokens but the last, which the model is never given.
    num_slots = num_left_out + num_prompt + generation_config.max_length - call.num_ids - 1
    num_slots += _num_more_candidates(model, generation_config)
    if max_length is not None and num_slots > max_length:
        raise ValueError(
            f"generate: the cache has max_length {max_length}, and the prompt and the new "
            f"tokens need {num_slots} slots; make it larger, or max_new_tokens smaller"
        )
    devices = {model.device.type}
    if setup.comm.world_size > 1:
        of_cache: Signature = (
            ("number of cached tokens", num_cached),
            ("kv_dtype", kv_dtype),
            ("max_length of the cache", max_length),
            ("whether keys may be far", has_far_keys),
        )
        signature = _signature(setup, model, generation_config, of_cache)
        note: Note = {"device": model.device.type}
        notes = setup.comm.agree(signature, setup.shard.timeout, "generate", note)
        devices = {str(note["device"]) for note in notes}
    if has_far_keys and devices == {"cpu"}:  # on the CPUs of all ranks
        check_device("generate", model.device)
    if makes_cache:
        cache = model_kwargs[CACHE_NAME] = setup.new_cache()
        check_layers("generate", model, cache)
        cache.reserve(num_prompt)
    call.cache, call.is_prepared = cache, True
    # A caller's methods may put embeddings in front of a prompt, as peft does.
    call.length = num_left_out + num_prompt - 1 if num_cached > 0 else None
    call.is_assisted = mode == GenerationMode.ASSISTED_GENERATION
    if cache is not None:
        if has_far_keys and len(devices) > 1:
            cache.shard.comm.meet_on_host()
        _make_room_for_hole(cache, hole, num_slots)
        for layer in cache.kv_layers:
            layer.keeps_last_pass = call.is_assisted
        num_new = num_left_out + num_prompt - num_cached
        _set_chunk_size(setup, model, generation_config, model_kwargs, num_new, num_cached)
        copies = num_copies(model, generation_config, call.inputs, model_kwargs)
        is_shareable = max_length is None and not (setup.shard.blocks.size or setup.has_far_keys)
        if makes_cache and copies > 1 and is_shareable:
            ids, size = call.inputs["input_ids"], generation_config.prefill_chunk_size
            cache = call.cache = read_once(model, cache, ids, copies, size)
            model_kwargs[CACHE_NAME], generation_config.prefill_chunk_size = cache, None
            call.length = num_prompt - 1
    usual = GenerationMixin._prepare_cache_for_generation
    if makes_cache and getattr(original, "func", None) is usual:
        return None  # which would make one of transformers, or note that a caller gave this one
    result = original(generation_config, model_kwargs, *others)
    if makes_cache and model_kwargs.get(CACHE_NAME) is not cache:
        raise ValueError(
            "generate: the model's own _prepare_cache_for_generation must leave the TreeCache "
            f"that it finds in model_kwargs[{CACHE_NAME!r}], got "
            f"a {type(model_kwargs.get(CACHE_NAME)).__name__}"
        )
    return result


def prepare_inputs(
    setup: Setup,
    original: Callable[..., Any],
    model: PreTrainedModel,
    input_ids: Tensor,
    *args: Any,
    **kwargs: Any,
) -> dict[str, Any]:
    """The inputs of a step, with the cache and without the tokens that it holds."""
    _check_prepared(setup, model)
    cache, has_whole_text = kwargs.get(CACHE_NAME), setup.calls.current.has_whole_text
    # Other kinds of decoding leave out what a given cache holds by themselves, and the first
    # step of transformers' assisted one feeds the whole text after it (5.23).
    is_whole = setup.calls.current.is_assisted and kwargs.get("next_sequence_length", 0) is None
    if is_whole and isinstance(cache, TreeCache) and has_whole_text:
        num_cached = int(cache.get_seq_length())
        if num_cached > 0:
            kwargs["next_sequence_length"] = input_ids.shape[1] - num_cached
    inputs: dict[str, Any] = original(input_ids, *args, **kwargs)
    # Phi-3 leaves the cache out where the text grows beyond the length from which its rotary
    # embedding has other frequencies: all tokens are fed again, and transformers would make its
    # own cache.
    if isinstance(cache, TreeCache) and inputs.get(CACHE_NAME) is None:
        num_cached = int(cache.get_seq_length())
        if num_cached > 0 and not has_whole_text:
            raise ValueError(
                "generate: at this length the model computes the keys of all tokens again, and "
                f"it was not given the first {num_cached}, of which the cache holds the keys; "
                "pass all tokens"
            )
        cache.reset()
        inputs[CACHE_NAME] = cache
    return inputs


def check_step(
    setup: Setup, original: Callable[..., Any], model: PreTrainedModel, *args: Any, **kwargs: Any
) -> dict[str, Any]:
    """Raises RuntimeError unless the cache, after a step, holds the text but its last token."""
    _check_prepared(setup, model)
    model_kwargs: dict[str, Any] = original(*args, **kwargs)
    call = setup.calls.current
    if call.cache is None:
        return model_kwargs
    held: Any = model_kwargs.get(CACHE_NAME)
    if held is not call.cache:
        raise RuntimeError(
            "generate: transformers replaced the TreeCache of an enabled model by a "
            f"{type(held).__name__}, which is not sharded; {generate_without_enable()}"
        )
    length = held.get_seq_length()
    # For a length that a GPU has, the host does not wait.
    is_known = not isinstance(length, Tensor) or length.device.type == "cpu"
    if call.length is not None:
        call.length += kwargs.get("num_new_tokens", 1)
    elif is_known:
        call.length = int(length)
    if is_known and length != call.length:
        raise RuntimeError(
            f"generate: after this step the cache must hold {call.length} tokens, the text but "
            f"its last one, and holds {int(length)}: transformers fed other tokens than those "
            f"that it lacked; {generate_without_enable()}"
        )
    return model_kwargs


def get_compiled_call(
    setup: Setup, original: Callable[..., Any], model: PreTrainedModel, compile_config: Any
) -> Callable[..., Any]:
    """The compiled forward pass, for steps that a CUDA graph can hold."""
    if setup.comm.world_size > 1:
        device = setup.comm.link.transport_device(model.device)
        if device.type != model.device.type:  # states travel through the host
            return model.__call__
    compiled = original(compile_config)

    # A chunk of a prompt would be a graph of its own, which takes minutes, and every rank would
    # compute all of its tokens.
    def call(**inputs: Any) -> Any:
        ids = inputs.get("input_ids")
        return (compiled if ids is not None and ids.shape[1] == 1 else model)(**inputs)

    return call


def _check_prepared(setup: Setup, model: PreTrainedModel) -> None:
    """Raises RuntimeError in a call of `generate` whose cache was chosen without enable."""
    name, call = "_prepare_cache_for_generation", setup.calls.current
    if call.arguments is not None and not call.is_prepared and not is_overridden(model, name):
        raise RuntimeError(
            f"generate: {name} was put on the model after enable and does not call the one "
            "that it replaced, which shards the cache; put it there before enable"
        )


def _set_chunk_size(
    setup: Setup,
    model: PreTrainedModel,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    num_new: int,
    num_cached: int,
) -> None:
    """Makes transformers read a long prompt in chunks, with what belongs to their tokens."""
    tensors = {name for name, x in model_kwargs.items() if isinstance(x, Tensor)}
    # transformers would give all of the others, as inputs_embeds, to every chunk.
    if tensors - _OF_TOKENS - {"attention_mask"}:
        generation_config.prefill_chunk_size = None
        return
    size = setup.prefill_chunk_size if may_be_chunked(model.config) else None
    if num_cached > 0 and not goes_on_from_states(model.config):
        # A pass of several tokens would forget the states of those before.
        size, generation_config.prefill_chunk_size = 1, None
    if generation_config.output_hidden_states:
        size = None  # transformers returns the hidden states of the last chunk alone
    if size is not None and splits_prompts(model, model_kwargs):
        shares = setup.prompt_shares or (1,) * setup.shard.world_size
        size = size * sum(shares) // max(shares)  # so that no rank computes more than `size` tokens
    if generation_config.prefill_chunk_size is None:
        if size is None or num_new <= size:
            return
        if num_cached > 0 and not CHUNKS_AFTER_CACHED_TOKENS:
            return
        generation_config.prefill_chunk_size = size
    # transformers cuts these by the places of tokens in the cache, whatever they begin with.
    for name in _OF_TOKENS & tensors:
        x = model_kwargs[name]
        if x.shape[-1] == num_cached + num_new:
            continue
        if x.shape[-1] < num_new:  # for the whole prompt, which may broadcast it
            generation_config.prefill_chunk_size = None
            return
        model_kwargs[name] = torch.nn.functional.pad(x[..., -num_new:], (num_cached, 0))


def _make_room_for_hole(cache: TreeCache, hole: int, num_slots: int) -> None:
    """Tells layers of how many slots the hole in a row's padding mask is, or refuses it."""
    if hole > 0 and cache.state_layers:
        raise NotImplementedError(f"generate: {HOLE_BESIDE_STATES}")
    for layer in cache.kv_layers:
        if isinstance(layer, WindowLayer):
            layer.make_room_for(hole, num_slots)


def _signature(
    setup: Setup,
    model: PreTrainedModel,
    generation_config: GenerationConfig,
    of_cache: Signature,
) -> Signature:
    """Fields that must be equal on all ranks. Otherwise they would merge states that do not
    belong together, or stop at different tokens."""
    arguments = setup.calls.current.arguments or {}
    inputs = arguments | setup.calls.current.inputs
    assistant = arguments.get("assistant_model")
    # Its candidates are a part of the queries.
    of_assistant: Signature = ()
    if assistant is not None:
        of_assistant = (
            *settings_of("assistant's generation", assistant.generation_config),
            *model_signature("assistant", assistant),
        )
    prefix_function = arguments.get("prefix_allowed_tokens_fn")
    random_states = [torch.get_rng_state()]
    if model.device.type == "cuda":
        random_states.append(torch.cuda.get_rng_state(model.device))
    return (
        ("transformers version", transformers.__version__),
        ("layout", setup.shard.layout),
        *of_cache,
        (
            "digest of the inputs (give all ranks the same: broadcast them)",
            describe({name: x for name, x in inputs.items() if isinstance(x, Tensor)}),
        ),
        *settings_of("generation", generation_config),
        ("synchronize_logits", setup.synchronize_logits is not None),
        ("prefill", setup.prefill),
        *describe_all("logits processor", arguments.get("logits_processor") or ()),
        *describe_all("stopping criterion", arguments.get("stopping_criteria") or ()),
        ("prefix_allowed_tokens_fn", describe(prefix_function, with_attributes=True)),
        *model_signature("model", model),
        ("assistant_model", describe(assistant)),
        *of_assistant,
        (
            "kind of device (CPUs and GPUs draw other random numbers)",
            model.device.type if generation_config.do_sample else None,
        ),
        (
            "digest of the random state (see seed_ranks)",
            describe(random_states) if generation_config.do_sample else None,
        ),
    )


def _by_name(
    original: Callable[..., Any], model: PreTrainedModel, args: Any, kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of a call of `generate`; `original` may be a caller's method with its own."""
    parameters = inspect.signature(original).parameters
    if any(x.kind is inspect.Parameter.VAR_POSITIONAL for x in parameters.values()):
        parameters = inspect.signature(MethodType(GenerationMixin.generate, model)).parameters
    return under_new_name(dict(zip(parameters, args, strict=False)) | {**kwargs})


def _num_more_candidates(model: PreTrainedModel, config: GenerationConfig) -> int:
    """The largest number of candidate tokens fed, and cropped, beyond the last one asked for."""
    if config.prompt_lookup_num_tokens is None and getattr(config, "use_mtp", False):
        drafts: int | None = getattr(model.config.get_text_config(), "num_mtp_layers", None)
        return drafts or 0  # in every step, however few tokens are missing
    return (config.prompt_lookup_num_tokens or 1) - 1


REPLACEMENTS: dict[str, Callable[..., Any]] = {
    "generate": generate,
    "_prepare_model_inputs": note_inputs,
    "_prepare_cache_for_generation": prepare_cache,
    "get_compiled_call": get_compiled_call,
    "prepare_inputs_for_generation": prepare_inputs,
    "_update_model_kwargs_for_generation": check_step,
    "_get_logits_processor": add_processor,
}
