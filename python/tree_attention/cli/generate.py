# SPDX-License-Identifier: BSD-3-Clause
"""`python -m tree_attention generate`: text from a checkpoint, its cache sharded over the ranks."""

import argparse
import json
import os
import reprlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ... import ExchangeError
from ..._json import read_json_object, replace_file
from ...exchange import candidates
from ..screen import Screen, table
from ..usage import UsageError, report, writing
from ..world import World, joined_world
from .arguments import DTYPES, parse
from .checkpoint import damages_named, load, load_tokenizer, make_greedy
from .memory import keep_freed_memory

_WROTE = "name a file that --json wrote"


def main(arguments: list[str]) -> int:
    parsed = parse(arguments)
    keep_freed_memory()
    device = choose_device(parsed.device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    with joined_world(backend, timeout=parsed.timeout) as world:
        return run(parsed, world, device)


def choose_device(name: str) -> torch.device:
    """The device that `--device` names: of GPUs, one for each process of this machine."""
    rank = int(os.environ.get("LOCAL_RANK", 0))
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    num_processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if name == "cpu" or (name == "auto" and num_gpus < num_processes):
        return torch.device("cpu")
    if num_gpus < num_processes:
        raise UsageError(
            f"--device cuda needs a GPU for each process of this machine, which has {num_gpus} for "
            f"{num_processes}: start fewer, or leave --device out"
        )
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def run(arguments: argparse.Namespace, world: World, device: torch.device) -> int:
    if arguments.attention == "sdpa" and world.size > 1:
        raise UsageError("--attention sdpa runs in one process: start it without torchrun")
    if world.size % arguments.tensor_parallel_size:
        raise UsageError(
            f"--tensor-parallel-size must divide the number of processes {world.size}, got "
            f"{arguments.tensor_parallel_size}"
        )
    text = prompt_text(arguments)
    expected = None if arguments.same_tokens_as is None else read_tokens(arguments.same_tokens_as)
    tokenizer, model = load_model(arguments, world, device)
    unused = make_greedy(model, arguments.model)
    if unused and world.root:
        names = ", ".join(unused)
        report("generate", f"greedy: of generation_config.json, {names} count for nothing")
    from . import steps as generation

    input_ids = tokenizer(text, return_tensors="pt")["input_ids"].to(device)
    check_lengths(input_ids.shape[1], arguments.max_new_tokens, model.config)
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    cache = new_cache(arguments, model)
    with Screen(world.root, text, input_ids.shape[1], model, tokenizer) as screen:
        try:
            result = generation.generate(
                model,
                input_ids,
                cache,
                streamer=screen.streamer,
                max_new_tokens=arguments.max_new_tokens,
                pad_token_id=pad,
            )
        except ExchangeError as error:
            raise ExchangeError(f"{error}. {advice(model, cache)}") from error
    measured = result.to_json()
    completion = tokenizer.decode(result.tokens, skip_special_tokens=True)
    screen.console.print(table(measured, arguments.attention, world.size))
    if world.root and arguments.json is not None:
        content = {
            "attention": arguments.attention,
            "world_size": world.size,
            "completion": completion,
            **measured,
        }
        with writing("--json", arguments.json):
            replace_file(arguments.json, json.dumps(content, indent=1) + "\n")
    if expected is None:
        return 0
    return compare_tokens(arguments.same_tokens_as, expected, result.tokens, screen.console)


def load_model(
    arguments: argparse.Namespace, world: World, device: torch.device
) -> tuple[Any, Any]:
    """The tokenizer and the model, enabled, with this rank's part of the weights or all of them."""
    dtype = None if arguments.dtype == "auto" else DTYPES[arguments.dtype]
    path: Path = arguments.model
    tokenizer = load_tokenizer(path)
    from ... import hf
    from ...hf.weights.plan import CannotSplitError

    # Prompts are dealt to ranks which have all weights.
    can_split = arguments.weights != "replicated" and arguments.prefill != "split"
    if world.size > 1 and can_split:
        try:
            check_strategy(arguments, world)
            with damages_named(path):
                return tokenizer, hf.from_pretrained(
                    path,
                    tensor_parallel_size=arguments.tensor_parallel_size,
                    dtype=dtype,
                    device=device,
                    prefill=arguments.prefill,
                    timeout=arguments.timeout,
                )
        except ExchangeError as error:
            raise ExchangeError(f"{error}. Start all ranks again.") from error
        except CannotSplitError as error:
            if arguments.weights == "split":
                raise UsageError(f"--weights split: {error}") from error
            if world.root:
                report("generate", f"every process has all weights: {error}")
    model = load(path, attn_implementation=arguments.attention, dtype=dtype or "auto").to(device)
    if arguments.attention == "tree_attention":
        try:
            hf.enable(model, prefill=arguments.prefill, timeout=arguments.timeout)
        except ValueError as error:
            raise UsageError(
                f"--model {path}: {error}; --attention sdpa generates in one process"
            ) from error
    return tokenizer, model


def check_strategy(arguments: argparse.Namespace, world: World) -> None:
    """Raises CannotSplitError if the strategy cannot give each process the heads that are its own,
    as split weights need wherever several share a cache."""
    from ...hf.weights.plan import CannotSplitError

    able = ("auto", *candidates(torch.float32, head_sharded=True))
    if arguments.strategy not in able and arguments.tensor_parallel_size < world.size:
        raise CannotSplitError(
            f"with split weights --strategy must be one of {', '.join(able)}, got "
            f"{arguments.strategy}"
        )


def advice(model: Any, cache: Any) -> str:
    """Sentence on what to do after an exchange that failed."""
    from ...hf.weights.split import mesh_of

    mesh = mesh_of(model)
    communicators = [cache.shard.comm, *(() if mesh is None else mesh.communicators)]
    # Ranks that differ find that out before they send anything.
    if all(comm.failed is None for comm in communicators):
        return "Nothing is lost: start all ranks again, alike."
    if cache.get_seq_length() == 0:
        return "Start all ranks again."
    return "A part of the cache is lost with the rank that held it: start all ranks again."


def new_cache(arguments: argparse.Namespace, model: Any) -> Any:
    from transformers import DynamicCache

    from ...hf import TreeCache
    from ...hf.weights.split import mesh_of

    if arguments.attention == "sdpa":
        return DynamicCache(config=model.config)
    mesh = mesh_of(model)
    group = None if mesh is None else mesh.context_group
    return TreeCache(
        model.config,
        group,
        kv_dtype=None if arguments.kv_dtype == "auto" else arguments.kv_dtype,
        strategy=arguments.strategy,
        timeout=arguments.timeout,
    )


def prompt_text(arguments: argparse.Namespace) -> str:
    if arguments.prompt_file is None:
        try:
            # Bytes of the command line that are no UTF-8 come as surrogates.
            return arguments.prompt.encode("utf-8", "surrogateescape").decode()
        except UnicodeError as error:
            raise UsageError(f"--prompt must be UTF-8: {error}") from error
    try:
        return arguments.prompt_file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--prompt-file {arguments.prompt_file}: {error}") from error


def check_lengths(prompt_tokens: int, new_tokens: int, config: Any) -> None:
    if prompt_tokens == 0:
        raise UsageError("the prompt is empty: the model needs at least one token to begin with")
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and prompt_tokens + new_tokens > limit:
        raise UsageError(
            f"the prompt has {prompt_tokens} tokens and {new_tokens} are to follow, but the model "
            f"has {limit} positions: shorten the prompt or --max-new-tokens"
        )


def compare_tokens(
    path: Path, expected: Sequence[int], tokens: Sequence[int], console: Console
) -> int:
    """Says whether the new tokens are those that another run wrote; returns the exit status."""
    if list(tokens) == list(expected):
        console.print(f"The same {len(expected)} tokens as in {path}.", markup=False)
        return 0
    console.print(
        f"Other tokens than in {path}: {list(tokens)}, there {expected}",
        style="red",
        markup=False,
    )
    return 1


def read_tokens(path: Path) -> list[int]:
    """The tokens that another run wrote with --json."""
    try:
        tokens = read_json_object(path, "--same-tokens-as").get("tokens")
    except OSError as error:
        raise UsageError(f"--same-tokens-as {path}: {error.strerror}; {_WROTE}") from error
    except ValueError as error:
        raise UsageError(f"{error}; {_WROTE}") from error
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise UsageError(
            f"--same-tokens-as {path}: tokens must be a list of integers, got "
            f"{reprlib.repr(tokens)}; {_WROTE}"
        )
    return tokens
