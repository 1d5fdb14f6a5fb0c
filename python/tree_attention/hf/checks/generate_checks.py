# SPDX-License-Identifier: BSD-3-Clause
"""What an enabled model does before the first step of `generate`, between steps and at the end."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, MaxTimeCriteria, PreTrainedModel

from ...exchange import Communicator, ExchangeError, Signature, sentence
from ..cache.tree_cache import TreeCache
from ..cache.window import WindowLayer
from ..prompts.forward import is_dealt_in_generate, may_be_chunked
from ..sampling import SynchronizeLogits
from .fingerprint import (
    describe,
    describe_all,
    digest_inputs,
    digest_random_state,
    model_signature,
    settings_of,
)

# Older releases prefill wrong tokens when a cache that holds some already is filled in chunks.
_CHUNKS_AFTER_CACHED_TOKENS = Version(transformers.__version__) >= Version("5.23")
# Whether the thread is in a call of `generate` at whose end ranks meet: those of an assistant are.
_is_inside = ContextVar("_is_inside", default=False)


class _Call(threading.local):
    """The call of `generate` in progress in this thread."""

    def __init__(self) -> None:
        self.arguments: dict[str, Any] = {}
        self.processors: list[Any] = []  # those that the caller gave
        self.cache: TreeCache | None = None
        self.length = 0  # tokens that it must hold after the steps so far
        self.is_assisted = False  # steps feed candidates, too


class Preparation:
    """Calls of `generate` of an enabled model: refuses what cannot work, compares the ranks before
    the first step and at the end, and makes the cache."""

    def __init__(
        self,
        comm: Communicator,
        new_cache: Callable[[], TreeCache],
        prefill_chunk_size: int | None,
        synchronize_logits: SynchronizeLogits | None,
        prefill: str,
    ) -> None:
        self.comm = comm  # of all ranks that run the model; a step's first exchange is on it
        self.new_cache = new_cache
        self.prefill_chunk_size = prefill_chunk_size
        self.synchronize_logits = synchronize_logits
        self.prefill = prefill
        cache = new_cache()  # refuses now what every call of generate would refuse
        self.shard, self.kv_dtype, self.max_length = cache.shard, cache.kv_dtype, cache.max_length
        self.call = _Call()

    def run(self, generate: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """The output of `generate` for arguments by name, if it raised on no rank and all ranks
        have the same tokens."""
        is_inside, call = _is_inside.get(), vars(self.call)
        meets, outer = self.comm.world_size > 1 and not is_inside, {**call}
        with self._turn():
            token = _is_inside.set(meets or is_inside)
            try:
                output = generate(**self._begin(arguments))
            except ExchangeError:  # which the others have, too
                raise
            except Exception as error:
                if meets:
                    with suppress(ExchangeError):  # the others have it from this rank
                        self._meet(f"end of generate by {type(error).__name__}: {sentence(error)}")
                raise
            finally:
                _is_inside.reset(token)
                call.update(outer)
            if meets:
                tokens = describe(getattr(output, "sequences", output))
                self._meet("end of generate", ("digest of the tokens", tokens))
            return output

    def _meet(self, op: str, *signature: tuple[str, object]) -> None:
        """Compares `op` with that of the other ranks, also of those that are still in a step."""
        self.comm.agree(signature, self.shard.timeout, op)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Surrounds a call of `generate`: over ranks, no other thread may use the group until it
        ends. Ranks may call it in threads of any name, as it compares inputs and settings itself.
        """
        with (
            self.comm.turn("generate", name="generate"),
            self.shard.comm.turn("generate", name="generate"),
        ):
            yield

    def _begin(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Takes the arguments of `generate` by name and returns those with which to go on."""
        if arguments.get("cache_implementation") == "paged":
            # `_refuse` would come too late: for a paged cache, transformers leaves `generate`
            # before it asks for a cache.
            raise _unsupported_cache("paged")
        self.call.processors = [*(arguments.get("logits_processor") or ())]
        if self.synchronize_logits is not None:
            processors = LogitsProcessorList([*self.call.processors, self.synchronize_logits])
            arguments = {**arguments, "logits_processor": processors}
        self.call.arguments = arguments
        return arguments

    def prepare_cache(
        self,
        model: PreTrainedModel,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        num_slots: int,
    ) -> None:
        """Puts a cache into `model_kwargs` and a chunk size into `generation_config`, which belongs
        to this call alone, and has every rank raise if the ranks differ.

        `num_slots`: of the prompt and all new tokens but the last, which is never fed.
        """
        self._refuse(generation_config)
        cache = model_kwargs.get("past_key_values")
        makes_cache = cache is None and generation_config.use_cache is not False
        num_prompt, num_cached = self._prompt_length(), 0
        kv_dtype, max_length = self.kv_dtype, self.max_length if makes_cache else None
        if cache is not None:
            if not isinstance(cache, TreeCache):
                raise ValueError(
                    "generate: past_key_values of an enabled model must be a TreeCache, "
                    f"got {type(cache).__name__}"
                )
            if self.shard.world_size > 1 and cache.shard.layout != self.shard.layout:
                raise ValueError(
                    f"generate: the cache has the layout {cache.shard.layout} and the model was "
                    f"enabled with {self.shard.layout}: call enable(model, layout=...) with the "
                    "cache's, or cache.reshard with the model's"
                )
            wanted = self.shard.deterministic
            if wanted and cache.shard.deterministic != wanted:
                raise ValueError(
                    f"generate: the cache has deterministic={cache.shard.deterministic} and the "
                    f"model was enabled with {wanted}: make or load the cache with it"
                )
            num_cached, kv_dtype = int(cache.get_seq_length()), cache.kv_dtype
            max_length = cache.max_length
            self._refuse_cached_prompt(num_prompt, num_cached)
            if not self._is_whole_sequence(num_prompt):
                num_slots += num_cached
        # A prompt lookup also feeds candidates that are more than the tokens asked for.
        num_slots += (generation_config.prompt_lookup_num_tokens or 1) - 1
        if max_length is not None and num_slots > max_length:
            raise ValueError(
                f"generate: the cache has max_length {max_length}, and the prompt and the new "
                f"tokens need {num_slots} slots; make it larger, or max_new_tokens smaller"
            )
        if self.comm.world_size > 1:
            self.comm.agree(
                self._signature(model, generation_config, num_cached, kv_dtype, max_length),
                self.shard.timeout,
                "generate",
            )
        if makes_cache:
            cache = self.new_cache()
            cache.reserve(num_prompt)
            model_kwargs["past_key_values"] = cache
        self.call.cache, self.call.length = cache, num_prompt - 1
        self.call.is_assisted = (
            generation_config.prompt_lookup_num_tokens is not None
            or self.call.arguments.get("assistant_model") is not None
        )
        for layer in () if cache is None else cache.layers:
            if isinstance(layer, WindowLayer) and self.call.is_assisted:
                layer.keeps_last_pass = True
        if not self._is_whole_sequence(num_prompt):
            self.call.length += num_cached
        if cache is not None:
            self._set_chunk_size(model, generation_config, model_kwargs, num_prompt, num_cached)

    def leave_out_cached(self, input_ids: torch.Tensor, options: dict[str, Any]) -> dict[str, Any]:
        """Has the first step of assisted decoding feed no token that a given cache holds.

        Other kinds of decoding leave them out by themselves, and transformers' assisted one feeds
        the whole text behind them (5.23).
        """
        cache = options.get("past_key_values")
        is_whole = options.get("next_sequence_length", 0) is None
        if not (self.call.is_assisted and is_whole and isinstance(cache, TreeCache)):
            return options
        num_cached = int(cache.get_seq_length())
        if num_cached == 0 or not self._is_whole_sequence(self._prompt_length()):
            return options
        return {**options, "next_sequence_length": input_ids.shape[1] - num_cached}

    def keep_cache(self, given: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        """Puts the cache that a step was given into its inputs, emptied, where the model left it
        out.

        Phi-3 does so where the text grows beyond the length from which its rotary embedding has
        other frequencies: all tokens are fed again, and transformers would make a cache that is not
        sharded.
        """
        if not isinstance(given, TreeCache) or inputs.get("past_key_values") is not None:
            return inputs
        num_cached = int(given.get_seq_length())
        if num_cached > 0 and not self._is_whole_sequence(self._prompt_length()):
            raise ValueError(
                "generate: at this length the model computes the keys of all tokens anew, and it "
                f"was not given the first {num_cached}, of which the cache holds the keys; pass "
                "all tokens"
            )
        given.reset()
        return {**inputs, "past_key_values": given}

    def check_step(self, model_kwargs: dict[str, Any], num_new_tokens: int = 1) -> None:
        """Raises RuntimeError unless the cache, after a step, holds the text but its last token."""
        call = self.call
        if call.cache is None:
            return
        held: Any = model_kwargs.get("past_key_values")
        if held is not call.cache:
            raise RuntimeError(
                "generate: transformers replaced the TreeCache of an enabled model by a "
                f"{type(held).__name__}, which is not sharded; generate without enable"
            )
        call.length += num_new_tokens
        length = held.get_seq_length()
        # For a length that a GPU has, the host does not wait.
        is_known = not isinstance(length, Tensor) or length.device.type == "cpu"
        if is_known and length != call.length:
            raise RuntimeError(
                f"generate: after this step the cache must hold {call.length} tokens, the text but "
                f"its last one, and holds {int(length)}: transformers fed other tokens than those "
                "that it lacked; generate without enable"
            )

    def is_capturable(self, device: torch.device) -> bool:
        """Whether a CUDA graph can hold a step: not where states travel through the host."""
        if self.comm.world_size == 1:
            return True
        return self.comm.link.transport_device(device).type == device.type

    def _refuse(self, generation_config: GenerationConfig) -> None:
        if generation_config.cache_implementation not in (None, "dynamic"):
            raise _unsupported_cache(generation_config.cache_implementation)
        if generation_config.output_attentions:
            raise NotImplementedError(
                "generate: output_attentions is not supported, as the attention weights are never "
                "formed; use attn_implementation='eager' without enable"
            )
        criteria = self.call.arguments.get("stopping_criteria") or ()
        if self.comm.world_size > 1 and (
            generation_config.max_time is not None
            or any(isinstance(criterion, MaxTimeCriteria) for criterion in criteria)
        ):
            raise NotImplementedError(
                "generate: max_time is not supported over several ranks: their clocks differ, and "
                "a rank that stops alone leaves the others waiting; use max_new_tokens"
            )

    def _refuse_cached_prompt(self, num_prompt: int, num_cached: int) -> None:
        if num_cached > 0 and self._is_whole_sequence(num_prompt) and num_cached >= num_prompt:
            raise ValueError(
                f"generate: the cache holds {num_cached} tokens and the prompt has {num_prompt}; "
                "at least one token must be new: call cache.crop(-1), or pass only the new tokens "
                "with an attention_mask over all tokens"
            )
        size = self.call.arguments.get("prefill_chunk_size")
        if num_cached > 0 and size is not None and not _CHUNKS_AFTER_CACHED_TOKENS:
            raise NotImplementedError(
                "generate: prefill_chunk_size with a cache that holds tokens needs transformers "
                f">= 5.23, got {transformers.__version__}"
            )

    def _is_whole_sequence(self, num_prompt: int) -> bool:
        """Whether the prompt has the tokens that a given cache holds, too."""
        mask = self.call.arguments.get("attention_mask")
        return mask is None or mask.shape[1] == num_prompt

    def _set_chunk_size(
        self,
        model: PreTrainedModel,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        num_prompt: int,
        num_cached: int,
    ) -> None:
        size = self.prefill_chunk_size if may_be_chunked(model.config) else None
        if generation_config.output_hidden_states:
            size = None  # transformers returns those of the last chunk alone
        if size is not None and is_dealt_in_generate(model, model_kwargs):
            size *= self.shard.world_size
        if generation_config.prefill_chunk_size is not None or size is None or num_prompt <= size:
            return
        if num_cached > 0 and not _CHUNKS_AFTER_CACHED_TOKENS:
            return
        if model_kwargs.get("inputs_embeds") is None:  # only token ids are split into chunks
            generation_config.prefill_chunk_size = size

    def _prompt_length(self) -> int:
        for name in ("inputs", "input_ids", "inputs_embeds"):
            if self.call.arguments.get(name) is not None:
                return self.call.arguments[name].shape[1]
        return 1  # without a prompt, generate begins with the bos token

    def _signature(
        self,
        model: PreTrainedModel,
        generation_config: GenerationConfig,
        num_cached: int,
        kv_dtype: torch.dtype | None,
        max_length: int | None,
    ) -> Signature:
        """What must be equal on all ranks. Otherwise they would merge states that do not belong
        together, or stop at different tokens."""
        sampling = generation_config.do_sample
        assistant = self.call.arguments.get("assistant_model")
        return (
            ("transformers version", transformers.__version__),
            ("layout", self.shard.layout),
            ("number of cached tokens", num_cached),
            ("kv_dtype", kv_dtype),
            ("max_length of the cache", max_length),
            ("digest of the inputs", digest_inputs(self.call.arguments)),
            *settings_of("generation", generation_config),
            ("synchronize_logits", self.synchronize_logits is not None),
            ("prefill", self.prefill),
            *describe_all("logits processor", self.call.processors),
            *describe_all("stopping criterion", self.call.arguments.get("stopping_criteria") or ()),
            (
                "prefix_allowed_tokens_fn",
                describe(self.call.arguments.get("prefix_allowed_tokens_fn"), with_attributes=True),
            ),
            *model_signature("model", model),
            ("assistant_model", describe(assistant)),
            *([] if assistant is None else _assistant_signature(assistant)),
            (
                "digest of the random state (see seed_ranks)",
                digest_random_state(model.device) if sampling else None,
            ),
        )


def _assistant_signature(assistant: PreTrainedModel) -> Signature:
    """What decides on the candidates of an assistant, which are a part of the queries."""
    settings = settings_of("assistant's generation", assistant.generation_config)
    return *settings, *model_signature("assistant", assistant)


def _unsupported_cache(name: str) -> NotImplementedError:
    return NotImplementedError(
        f"generate: cache_implementation={name!r} is not supported by an enabled model, whose "
        "cache is a TreeCache; static, quantized, offloaded and paged caches are not sharded"
    )
