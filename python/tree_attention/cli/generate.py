# SPDX-License-Identifier: BSD-3-Clause
"""`tree-attention generate`: text from a checkpoint, its cache sharded over the ranks.

Arguments and files are looked at before torch and transformers are imported, which takes seconds.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import pkgutil
import reprlib
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._environment import read_integer
from .._json import read_json_object, replace_file
from ..planning.models import WEIGHT_DTYPES
from .far import add_far_options, check_far_options
from .rank import is_launched
from .run import check_ranks, launch
from .shares import check_shares, may_split, strategies_of_split, takes_strategy, taking_part
from .usage import (
    A_CHECKPOINT,
    MAX_PROCESSES,
    UsageError,
    add_timeout,
    argument_parser,
    check_can_be_written,
    check_checkpoint,
    printable,
    report,
    writing,
)

if TYPE_CHECKING:
    import torch

    from .shares import Part

# Options that also take "auto", which is the default.
_CHOICES = {
    "device": (
        ("cpu", "cuda"),
        "Device of the tensors. auto takes CUDA if every process of this machine has a GPU",
    ),
    "dtype": (
        ("float32", "bfloat16", "float16"),
        "Dtype of the weights and of the arithmetic. auto takes the checkpoint's",
    ),
    "kv-dtype": (
        ("int8", "fp8"),
        "Dtype of the key/value cache. auto takes that of --dtype; the others keep 8 bits, and a "
        "scale for each token and head",
    ),
    "weight-dtype": (
        tuple(name for name in WEIGHT_DTYPES if name != "bf16"),
        "Dtype of the weights of linear layers and experts, which are quantised while they are "
        "read. auto takes that of --dtype",
    ),
    "weights": (
        ("split", "replicated"),
        "Whether each process keeps a part of the weights (split) or all of them (replicated). "
        "auto splits them if the model can be split",
    ),
    "prefill": (
        ("split", "replicated"),
        "With replicated weights, whether each process reads a part of the prompt (split) or the "
        "whole prompt (replicated). auto splits long prompts",
    ),
}


# Strategies that not every group of processes can take.
_OF_SOME_DEVICES = ("one_shot",)


def main(arguments: list[str]) -> int:
    return start(arguments, parse, check, run)


def start(
    arguments: list[str],
    parse: Callable[[list[str]], argparse.Namespace],
    check: Callable[[argparse.Namespace], None],
    work: Callable[[argparse.Namespace, Part, torch.device], int],
) -> int:
    """Runs `work` of a command that has a model, on all ranks; returns the exit status."""
    parsed = parse(arguments)
    check(parsed)
    if "RANK" not in os.environ:
        check_number(parsed, parsed.ranks)
    elif "WORLD_SIZE" in os.environ:  # else `joined_world` says what is missing
        check_number(parsed, read_integer("WORLD_SIZE", 1, MAX_PROCESSES))
    command = parsed.command
    if parsed.ranks > 1 and not is_launched():
        return launch(command, parsed.ranks, ["-m", "tree_attention", command, *arguments])
    from .._numbers import DEFAULT_TIMEOUT
    from .world import choose_device, joined_world

    keep_freed_memory()
    device = choose_device(parsed.device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    # What ranks have to start is not what they have to answer.
    to_start, parsed.timeout = parsed.timeout, parsed.timeout or DEFAULT_TIMEOUT
    with (
        joined_world(backend, to_start, parsed.timeout) as world,
        taking_part(parsed, world, device) as part,
    ):
        return 0 if part is None else work(parsed, part, device)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argument_parser(
        "generate",
        "Prints the text that a checkpoint generates, and its times and memory on stderr. With "
        "several ranks every process keeps its share of the key/value cache, and of the weights "
        "if they are split.",
        'generate --model DIR --prompt "The sky is" --temperature 0.7 --top-p 0.9 --seed 1',
        "generate --model DIR --prompt-file question.txt --chat --ranks 2 > answer.txt",
        'generate --model DIR --prompt "The sky is" --max-new-tokens 200 --json one.json',
        'generate --model DIR --prompt "The sky is" --max-new-tokens 200 --ranks 4 '
        "--tensor-parallel-size 2 --strategy two_phase --same-tokens-as one.json",
        "generate --model DIR --prompt-file question.txt --device cuda --far cpu --near-tokens 8k",
    )
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="Text that the model goes on from.")
    prompt.add_argument(
        "--prompt-file",
        type=Path,
        metavar="FILE",
        help="File with the text that the model goes on from, in UTF-8.",
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="Put the prompt as a user's message into the tokenizer's chat template; for models "
        "that are trained on chats.",
    )
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        default=64,
        metavar="N",
        help="Largest number of tokens to generate (default: 64).",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help="Sample each token from logits that are divided by this number, such as 0.7; 0 takes "
        "the likeliest token (default: 0).",
    )
    parser.add_argument(
        "--top-p",
        type=float,
        metavar="P",
        help="Sample only among the likeliest tokens whose probabilities add up to this number, "
        "such as 0.9 (default: among all tokens).",
    )
    parser.add_argument(
        "--seed",
        type=int,
        metavar="N",
        help="Seed of the samples; equal seeds give equal texts (default: a new one each time).",
    )
    add_model_options(parser)
    add_far_options(parser)
    parser.add_argument(
        "--attention",
        choices=("tree_attention", "sdpa"),
        default="tree_attention",
        help="Attention of the model; sdpa is plain HuggingFace in one process, for comparison "
        "(default: tree_attention).",
    )
    parser.add_argument(
        "--shares",
        default="even",
        metavar="even|auto|A,B,...",
        help="How much of the weights and of the cache each rank gets: the same (even), an integer "
        "for each rank, such as 3,1, or by the speed of their hosts, which auto measures; it "
        "leaves out ranks without which a token takes less time (default: even).",
    )
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="File to write the tokens and the measurements to (default: none).",
    )
    parser.add_argument(
        "--same-tokens-as",
        type=Path,
        metavar="FILE",
        help="File that --json wrote in another run: exit with status 1 unless the new tokens are "
        "equal to its tokens.",
    )
    parser.set_defaults(command="generate")
    return parser.parse_args(arguments)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of every command that runs a model over ranks."""
    parser.add_argument(
        "--model", type=Path, required=True, metavar="DIR", help=f"Model: a {A_CHECKPOINT}."
    )
    parser.add_argument(
        "--ranks",
        type=int,
        default=1,
        metavar="N",
        help="Number of ranks, each a process that is started on this machine (default: 1). To run "
        "on several machines, leave it out and start the command with torchrun.",
    )
    for name, (choices, text) in _CHOICES.items():
        named, text = ("auto", *choices), f"{text} (default: auto)."
        parser.add_argument(f"--{name}", choices=named, default="auto", help=text)
    parser.add_argument(
        "--strategy",
        default="auto",
        metavar="NAME",
        help="How the ranks exchange their partial results: auto, or a strategy that `info` lists "
        "(default: auto).",
    )
    parser.add_argument(
        "--tensor-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="Number of neighbouring processes that split the heads, while the cache is split over "
        "the rest; it must divide the number of processes (default: 1).",
    )
    add_timeout(parser, "to load or to answer")


def check(arguments: argparse.Namespace) -> None:
    """Raises UsageError for options that are wrong, or wrong together."""
    check_new_tokens(arguments)
    check_model_options(arguments)
    check_sampling(arguments)
    check_far(arguments)
    if arguments.attention == "sdpa" and arguments.ranks > 1:
        raise UsageError("--attention sdpa runs in one process: leave --ranks out")
    if arguments.json is not None:
        check_can_be_written("--json", arguments.json)
    check_checkpoint(arguments.model)
    check_read_by_all("--prompt-file", arguments.prompt_file, arguments.ranks)
    arguments.text = prompt_text(arguments)
    arguments.expected = read_tokens(arguments.same_tokens_as)


def check_new_tokens(arguments: argparse.Namespace) -> None:
    if arguments.max_new_tokens < 1:
        raise UsageError(f"--max-new-tokens must be at least 1, got {arguments.max_new_tokens}")


def check_model_options(arguments: argparse.Namespace) -> None:
    """Raises UsageError for options of `add_model_options` that are wrong, or wrong together."""
    size = arguments.tensor_parallel_size
    if size < 1:
        raise UsageError(f"--tensor-parallel-size must be at least 1, got {size}")
    if size != 1 and (arguments.weights == "replicated" or arguments.prefill == "split"):
        raise UsageError(
            f"--tensor-parallel-size {size} splits weights: leave --weights replicated and "
            "--prefill split out"
        )
    if arguments.prefill == "split" and arguments.weights == "split":
        raise UsageError(
            "--prefill split divides the prompt among processes that have all weights: leave it "
            "out, or take --weights replicated"
        )
    if arguments.kv_dtype != "auto" and arguments.attention == "sdpa":
        raise UsageError(
            f"--kv-dtype {arguments.kv_dtype} needs --attention tree_attention: plain HuggingFace "
            "attends to keys in the dtype of the weights"
        )
    if arguments.weight_dtype != "auto" and (
        arguments.attention == "sdpa" or arguments.weights == "replicated"
    ):
        raise UsageError(
            f"--weight-dtype {arguments.weight_dtype} quantises what this program reads of the "
            "checkpoint itself: leave --attention sdpa and --weights replicated out"
        )
    if arguments.weight_dtype != "auto" and arguments.prefill == "split":
        raise UsageError(
            f"--weight-dtype {arguments.weight_dtype} quantises weights that are split: leave "
            "--prefill split out"
        )
    if arguments.strategy not in (able := ("auto", *strategy_names())):
        raise UsageError(f"--strategy must be one of {', '.join(able)}, got {arguments.strategy!r}")
    check_ranks("--ranks", arguments.ranks)
    if arguments.ranks > 1 and "RANK" in os.environ and not is_launched():
        raise UsageError(
            "--ranks starts the processes itself: leave it out under torchrun, or unset RANK"
        )


def check_far(arguments: argparse.Namespace) -> None:
    """Raises UsageError for far keys where there are none, as far as the options tell."""
    check_far_options(arguments)
    for option, name in (("--attention", "sdpa"), ("--prefill", "split"), ("--device", "cpu")):
        if arguments.far and getattr(arguments, option.removeprefix("--")) == name:
            raise UsageError(f"--far cpu is not supported with {option} {name}: leave one out")


def check_read_by_all(option: str, file: Path | None, ranks: int) -> None:
    """Raises UsageError for a file that only one of several processes could read."""
    if ranks > 1 and file is not None and not may_be_read_twice(file):
        raise UsageError(
            f"{option} {file}: every rank reads it, so with --ranks it must be a regular file"
        )


def may_be_read_twice(path: Path) -> bool:
    """False for a pipe, or for the standard input of one process."""
    in_system = path.absolute().parts[1:2] in (("dev",), ("proc",))
    return not path.exists() or (path.is_file() and not in_system)


def check_sampling(arguments: argparse.Namespace) -> None:
    temperature, top_p, seed = arguments.temperature, arguments.top_p, arguments.seed
    if temperature is not None and not (temperature >= 0 and math.isfinite(temperature)):
        raise UsageError(f"--temperature must be at least 0 and finite, got {temperature:g}")
    if top_p is not None and not 0 < top_p <= 1:
        raise UsageError(f"--top-p must be above 0 and at most 1, got {top_p:g}")
    if seed is not None and not 0 <= seed < 1 << 63:
        raise UsageError(f"--seed must be 0 to {(1 << 63) - 1}, got {seed}")
    if temperature == 0 and top_p is not None:
        raise UsageError(
            "--temperature 0 takes the likeliest token each time: leave --top-p out, or give a "
            "temperature above 0"
        )
    if seed is not None and not samples(arguments):
        raise UsageError("--seed is of samples: give --temperature or --top-p with it")


def samples(arguments: argparse.Namespace) -> bool:
    """True where tokens are drawn, rather than the likeliest ones taken."""
    return bool(arguments.temperature) or arguments.top_p is not None


def keep_freed_memory() -> None:
    """Makes malloc keep what is freed, where it is glibc's (docs/environment.md, glibc)."""
    with suppress(AttributeError, OSError):
        library, large = ctypes.CDLL(None), (1 << 31) - 1
        library.mallopt(-3, large)  # M_MMAP_THRESHOLD
        library.mallopt(-1, large)  # M_TRIM_THRESHOLD


def check_number(arguments: argparse.Namespace, size: int) -> None:
    """Raises UsageError for options that do not go with the number of processes."""
    if arguments.attention == "sdpa" and size > 1:
        raise UsageError("--attention sdpa runs in one process: start it without torchrun")
    if size % arguments.tensor_parallel_size:
        divides = f"must divide the number of processes {size}"
        raise UsageError(f"--tensor-parallel-size {divides}, got {arguments.tensor_parallel_size}")
    if arguments.shares != "auto":
        check_shares(arguments.shares, size, arguments.tensor_parallel_size)


def strategy_names() -> list[str]:
    """The names of `exchange.strategies()`, by the files that define them: these import torch."""
    files = pkgutil.iter_modules([str(Path(__file__).parents[1] / "exchange" / "strategies")])
    return [file.name for file in files if file.name not in _OF_SOME_DEVICES]


def run(arguments: argparse.Namespace, part: Part, device: torch.device) -> int:
    from ..exchange import ExchangeError
    from .checkpoint import load_config, load_tokenizer, make_greedy, num_positions, pad_token

    world = part.world
    if arguments.far and device.type != "cuda":
        raise UsageError(
            "--far cpu keeps older keys of a model on a GPU in the host's memory, and torch finds "
            "no GPU for each process here: leave --far out"
        )
    tokenizer = load_tokenizer(arguments.model)
    text = in_template(tokenizer, arguments) if arguments.chat else arguments.text
    # Not verbose: of a prompt that is too long it would foretell errors of indices.
    encoded = tokenizer(
        text, return_tensors="pt", add_special_tokens=not arguments.chat, verbose=False
    )
    input_ids = encoded["input_ids"].to(device)
    num_tokens, limit = input_ids.shape[1], num_positions(load_config(arguments.model))
    if num_tokens == 0:
        raise UsageError("the prompt is empty: the model needs at least one token to begin with")
    if limit is not None and num_tokens + arguments.max_new_tokens > limit:
        raise UsageError(
            f"the prompt has {num_tokens} tokens and {arguments.max_new_tokens} are to follow, but "
            f"the model has {limit} positions: shorten the prompt or --max-new-tokens"
        )
    model = load_model(arguments, part, device)
    unused = make_greedy(model, arguments.model)
    if unused and world.root:
        report("generate", f"of generation_config.json, {', '.join(unused)} count for nothing")
    from transformers import DynamicCache

    from .. import hf
    from . import generation

    pad = pad_token(tokenizer)
    if arguments.attention == "sdpa":
        cache: Any = DynamicCache(config=model.config)
    else:
        options = cache_options(arguments, part, model) | far_options(arguments)
        cache = hf.TreeCache(model.config, **options)
    options = {"max_new_tokens": arguments.max_new_tokens, "pad_token_id": pad}
    seed = None
    if samples(arguments):
        seed = secrets.randbits(32) if arguments.seed is None else arguments.seed
        hf.seed_ranks(part.group, seed, arguments.timeout)  # all take the first rank's
        # 0 of top_k: any token, where transformers takes one of 50.
        options |= {"do_sample": True, "top_k": 0, "top_p": arguments.top_p or 1.0}
        options |= {"temperature": arguments.temperature or 1.0}
    with generation.Screen(world.root, text, num_tokens, model, tokenizer) as screen:
        if seed is not None:
            screen.remarks.print(f"Samples of --seed {seed}", style="dim")
        try:
            result = generation.generate(model, input_ids, cache, streamer=screen, **options)
        except ExchangeError as error:
            raise ExchangeError(f"{error}. {advice(model, cache)}") from error
    measured = result.to_json()
    completion = tokenizer.decode(result.tokens, skip_special_tokens=True)
    table = generation.table(measured, arguments.attention, world.size)
    screen.remarks.print(table, soft_wrap=False)
    if world.root and arguments.json is not None:
        named = {"attention": arguments.attention, "world_size": world.size}
        content = {**named, "seed": seed, "completion": completion, **measured}
        with writing("--json", arguments.json):
            replace_file(arguments.json, json.dumps(content, indent=1) + "\n")
    path, expected = arguments.same_tokens_as, arguments.expected
    if path is None:
        return 0
    if result.tokens == expected:
        screen.remarks.print(f"The same {len(expected)} tokens as in {printable(path)}.")
        return 0
    different = f"Other tokens than in {printable(path)}: {result.tokens}, there {expected}"
    screen.remarks.print(different, style="red")
    return 1


def cache_options(arguments: argparse.Namespace, part: Part, model: Any) -> dict[str, Any]:
    """The arguments of a `TreeCache` of the model, or of the load of one, but its configuration."""
    from ..sharding import BlockCyclic
    from ..shares import ModelShares
    from ..weights.split import mesh_of

    mesh = mesh_of(model)
    found = (
        ModelShares.of("--shares", part.shares, part.world.size) if mesh is None else mesh.shares
    )
    layout = None
    if found.cache is not None:
        layout = BlockCyclic(len(found.cache), shares=found.cache)
    return {
        "group": part.group if mesh is None else mesh.context_group,
        "layout": layout,
        "kv_dtype": None if arguments.kv_dtype == "auto" else arguments.kv_dtype,
        "strategy": arguments.strategy,
        "timeout": arguments.timeout,
    }


def far_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options of a `TreeCache` of a command that has `--far`, or none."""
    if getattr(arguments, "far", None) is None:
        return {}
    return {"far": arguments.far, "near_tokens": arguments.near_tokens}


def in_template(tokenizer: Any, arguments: argparse.Namespace) -> str:
    """The prompt as a user's message of the tokenizer's chat template."""
    if not getattr(tokenizer, "chat_template", None):
        raise UsageError(
            f"--chat: the tokenizer in {arguments.model} has no chat template, as that of a model "
            "which is not made for chats: leave --chat out"
        )
    from ..exchange import sentence

    try:
        messages = [{"role": "user", "content": arguments.text}]
        text: str = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
    except Exception as error:  # templates are programs, and need jinja2
        template = f"--chat: the chat template in {arguments.model} cannot be used"
        raise UsageError(f"{template}: {sentence(error)}") from error
    return text


def load_model(arguments: argparse.Namespace, part: Part, device: torch.device) -> Any:
    """The model, enabled, with this rank's part of the weights or all of them."""
    import torch

    from .. import hf
    from ..exchange import ExchangeError
    from ..weights.plan import CannotSplitError
    from .checkpoint import damages_named, is_quantised, load

    dtype = None if arguments.dtype == "auto" else getattr(torch, arguments.dtype)
    path, size, world = arguments.model, arguments.tensor_parallel_size, part.world
    options: dict[str, Any] = {"group": part.group, "shares": part.shares}
    options |= {"prefill": arguments.prefill, "timeout": arguments.timeout}
    options |= far_options(arguments)
    scheme = None if arguments.weight_dtype == "auto" else arguments.weight_dtype
    # Where transformers reads weights of 8 or 4 bits, it needs another package for it. On a GPU it
    # keeps them so, and 16 bits may find no room.
    is_alone = world.size == 1 and device.type == "cpu"
    is_own = is_alone and arguments.attention == "tree_attention" and is_quantised(path)
    if (world.size > 1 and may_split(arguments)) or scheme is not None or is_own:
        try:
            if not takes_strategy(arguments, world.size):
                one_of = f"--strategy must be one of {', '.join(strategies_of_split())}"
                raise CannotSplitError(f"with split weights {one_of}, got {arguments.strategy}")
            with damages_named(path):
                return hf.from_pretrained(
                    path,
                    tensor_parallel_size=size,
                    dtype=dtype,
                    device=device,
                    weights=scheme,
                    **options,
                )
        except ExchangeError as error:
            raise ExchangeError(f"{error}. Start all ranks again.") from error
        except CannotSplitError as error:
            if arguments.weights == "split":
                raise UsageError(f"--weights split: {error}") from error
            if scheme is not None:
                raise UsageError(f"--weight-dtype {scheme}: {error}") from error
            if size > 1 and arguments.command != "generate":  # whose directories are of heads
                raise UsageError(f"--tensor-parallel-size {size}: {error}") from error
            if world.root:
                report(arguments.command, f"every process has all weights: {error}")
    if isinstance(part.shares, Mapping):  # of --shares auto, for weights that are split
        options["shares"] = {name: x for name, x in part.shares.items() if name != "weights"}
    model = load(path, attn_implementation=arguments.attention, dtype=dtype or "auto").to(device)
    if arguments.attention == "tree_attention":
        try:
            hf.enable(model, **options)
        except ValueError as error:
            instead = ""
            if arguments.command == "generate":
                instead = "; --attention sdpa generates in one process"
            raise UsageError(f"--model {path}: {error}{instead}") from error
    return model


def advice(model: Any, cache: Any) -> str:
    """Sentence on what to do after an exchange that failed."""
    from ..weights.split import mesh_of

    mesh = mesh_of(model)
    of_weights = () if mesh is None else (mesh.calls, *mesh.of_layers)
    # Ranks that differ find that out before they send anything.
    if all(comm.failed is None for comm in (cache.shard.comm, *of_weights)):
        return "Nothing is lost: start all ranks again, alike."
    if cache.get_seq_length() == 0:
        return "Start all ranks again."
    return "A part of the cache is lost with the rank that held it: start all ranks again."


def prompt_text(arguments: argparse.Namespace) -> str:
    """The text of the prompt, or UsageError where there is none."""
    file = arguments.prompt_file
    if file is None:
        text, named = text_of("--prompt", arguments.prompt), "--prompt"
    else:
        text, named = text_in("--prompt-file", file), f"--prompt-file {file}"
    if not text.strip():
        raise UsageError(f"{named}: the prompt is empty: the model needs a text to begin with")
    return text


def text_of(option: str, argument: str) -> str:
    """A text of the command line."""
    try:
        # Bytes of the command line that are no UTF-8 come as surrogates.
        return argument.encode("utf-8", "surrogateescape").decode()
    except UnicodeError as error:
        raise UsageError(f"{option} must be UTF-8: {error}") from error


def text_in(option: str, file: Path) -> str:
    """The text of the file that an option names."""
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeError as error:
        raise UsageError(f"{option} {file} must be UTF-8: {error}") from error
    except OSError as error:
        raise UsageError(f"{option} {file}: {error.strerror or error}") from error


def read_tokens(path: Path | None) -> list[int]:
    """The tokens that another run wrote with --json."""
    if path is None:
        return []
    try:
        tokens = read_json_object(path, "--same-tokens-as").get("tokens")
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            wrong = f"tokens must be a list of integers, got {reprlib.repr(tokens)}"
            raise ValueError(f"--same-tokens-as {path}: {wrong}")
    except (OSError, ValueError) as error:
        strerror = getattr(error, "strerror", None)
        reason = f"--same-tokens-as {path}: {strerror}" if strerror else error
        raise UsageError(f"{reason}; name a file that --json wrote") from error
    return tokens
