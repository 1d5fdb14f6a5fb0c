# SPDX-License-Identifier: BSD-3-Clause
"""`python -m tree_attention generate`: text from a checkpoint, its cache sharded over the ranks."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from .. import ExchangeError, strategies
from .world import World, joined_world

PASSKEY_NEW_TOKENS = 12
TEXT_NEW_TOKENS = 64


class UsageError(Exception):
    """What the user can put right; the message says how."""


@dataclass(frozen=True)
class Prompt:
    input_ids: list[int]
    text: str
    key: str | None = None  # the hidden pass key
    hint: str = ""  # the sentence that tells it

    def excerpt(self) -> str:
        """The text, or what matters of a long one, on one line."""
        text = " ".join(self.text.split())
        if len(text) <= 240:
            return text
        middle = f" [...]{self.hint} [...] " if self.hint else " [...] "
        return text[:70] + middle + text[-90:]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tree_attention generate",
        description="Greedy text from a checkpoint on the CPU. Under torchrun every process keeps "
        "its share of the key/value cache.",
    )
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="checkpoint")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT")
    prompt.add_argument("--prompt-file", type=Path, metavar="FILE", help="UTF-8 text")
    prompt.add_argument(
        "--passkey", action="store_true", help="a number hidden in prose, asked for at the end"
    )
    parser.add_argument(
        "--tokens", type=int, default=2000, help="length of the passkey prompt (default 2000)"
    )
    parser.add_argument(
        "--depth", type=float, default=0.5, help="of the pass key, 0 to 1 (default 0.5)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the passkey prompt (default 0)")
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        help=f"default {TEXT_NEW_TOKENS}, with --passkey {PASSKEY_NEW_TOKENS}",
    )
    parser.add_argument(
        "--attention",
        choices=("tree_attention", "sdpa"),
        default="tree_attention",
        help="sdpa: plain HuggingFace in one process, for comparison",
    )
    parser.add_argument(
        "--strategy",
        choices=("auto", *strategies()),
        default="auto",
        help="of the exchange between ranks (default auto)",
    )
    parser.add_argument(
        "--timeout", type=float, default=30.0, help="seconds to wait for a rank (default 30)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write tokens and measurements")
    parser.add_argument(
        "--same-tokens-as",
        type=Path,
        metavar="FILE",
        help="fail unless the new tokens are those in a --json file of another run",
    )
    parsed = parser.parse_args(arguments)
    errors = Console(stderr=True, highlight=False)
    try:
        with joined_world() as world:
            return run(parsed, world)
    except UsageError as error:
        errors.print(f"generate: {error}", style="red", markup=False)
        return 2
    except ExchangeError as error:
        errors.print(
            f"generate: {error}. Part of the cache is lost with a rank: start all ranks again.",
            style="red",
            markup=False,
        )
        return 1


def run(arguments: argparse.Namespace, world: World) -> int:
    if arguments.attention == "sdpa" and world.size > 1:
        raise UsageError("--attention sdpa runs in one process: start it without torchrun")
    try:
        from . import generation
    except ImportError as error:
        raise UsageError(str(error)) from error
    tokenizer, model = load(arguments.model, arguments.attention)
    prompt = make_prompt(arguments, tokenizer)
    limit = getattr(model.config, "max_position_embeddings", None)
    new_tokens = arguments.max_new_tokens
    if new_tokens is None:
        new_tokens = TEXT_NEW_TOKENS if prompt.key is None else PASSKEY_NEW_TOKENS
    if new_tokens < 1:
        raise UsageError(f"--max-new-tokens must be at least 1, got {new_tokens}")
    if limit is not None and len(prompt.input_ids) + new_tokens > limit:
        raise UsageError(
            f"the prompt has {len(prompt.input_ids)} tokens and {new_tokens} are to follow, but "
            f"the model has {limit} positions: shorten the prompt or --max-new-tokens"
        )
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    with Screen(world.root, prompt, model, tokenizer) as screen:
        result = generation.generate(
            model,
            screen.input_ids,
            new_cache(arguments, model),
            streamer=screen.streamer,
            max_new_tokens=new_tokens,
            pad_token_id=pad,
        )
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
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")
    return verdict(arguments, prompt, completion, result.tokens, screen.console)


def load(path: Path, attention: str) -> tuple[Any, Any]:
    """The checkpoint's tokenizer and model."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    from .. import hf  # registers the attention's name

    logging.disable_progress_bar()  # of loading the weights

    if not (path / "config.json").exists():
        raise UsageError(
            f"no checkpoint in {path}: --model takes a directory with config.json, "
            "*.safetensors and a tokenizer"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(
            path, attn_implementation=attention, dtype="auto", local_files_only=True
        )
    except (OSError, ValueError) as error:
        raise UsageError(f"the checkpoint in {path} does not load: {error}") from error
    if attention == "tree_attention":
        hf.enable(model)
    return tokenizer, model.eval()


def new_cache(arguments: argparse.Namespace, model: Any) -> Any:
    from transformers import DynamicCache

    from ..hf import TreeCache

    if arguments.attention == "sdpa":
        return DynamicCache(config=model.config)
    return TreeCache(model.config, strategy=arguments.strategy, timeout=arguments.timeout)


def make_prompt(arguments: argparse.Namespace, tokenizer: Any) -> Prompt:
    if arguments.passkey:
        from ..passkey import Haystack, build_prompt, needle

        try:
            haystack = Haystack.from_directory(arguments.model / "text", tokenizer)
            made = build_prompt(
                haystack, arguments.tokens, depth=arguments.depth, seed=arguments.seed
            )
        except (OSError, ValueError) as error:
            raise UsageError(f"--passkey: {error}") from error
        return Prompt(made.input_ids, made.text, made.key, needle(made.label, made.key))
    text = arguments.prompt
    if arguments.prompt_file is not None:
        try:
            text = arguments.prompt_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--prompt-file {arguments.prompt_file}: {error}") from error
    input_ids = tokenizer(text)["input_ids"]
    if not input_ids:
        raise UsageError("the prompt is empty: the model needs at least one token to begin with")
    return Prompt(input_ids, text)


class Screen:
    """What the user sees while it runs: the prompt, a bar during prefill, then the text.

    Only the root rank shows anything; the others go through the same motions.
    """

    def __init__(self, root: bool, prompt: Prompt, model: Any, tokenizer: Any) -> None:
        import torch
        from transformers import TextStreamer

        self.console = Console(quiet=not root, highlight=False)
        self.input_ids = torch.tensor([prompt.input_ids])
        self._prompt, self._model = prompt, model
        # The bar goes to stderr, so that redirected text is text only.
        errors = Console(stderr=True)
        self._progress = Progress(
            TextColumn("prefill"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=errors,
            transient=True,
            disable=not (root and errors.is_terminal),
        )
        screen = self

        class Printer(TextStreamer):
            def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
                screen.show(text, stream_end)

        self.streamer = Printer(tokenizer, skip_prompt=True, skip_special_tokens=True)

    def __enter__(self) -> "Screen":
        count = len(self._prompt.input_ids)
        text = f"Prompt ({count:,} tokens): {self._prompt.excerpt()}"
        self.console.print(text, style="dim", markup=False)
        self._task = self._progress.add_task("prefill", total=count)
        self._hook = self._model.register_forward_hook(self._forwarded, with_kwargs=True)
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._hook.remove()
        self._end_progress()

    def _end_progress(self) -> None:
        if self._progress.live.is_started:
            self._progress.stop()

    def _forwarded(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        self._progress.advance(self._task, kwargs["input_ids"].shape[1])

    def show(self, text: str, end: bool) -> None:
        self._end_progress()  # the first token ends the prefill
        self.console.out(text, end="\n" if end else "")


def table(measured: dict[str, Any], attention: str, world_size: int) -> Table:
    processes = f"{world_size} process{'es' if world_size > 1 else ''}"
    result = Table(title=f"{attention}, {processes}", title_justify="left", show_header=False)
    rows = [
        ("prompt, new tokens", f"{measured['prompt_tokens']:,}, {measured['new_tokens']}"),
        ("time to first token", f"{measured['ttft_s']:.3f} s"),
        ("prefill", f"{measured['prefill_tokens_per_s']:,.0f} tokens/s"),
    ]
    if "tokens_per_s" in measured:
        rows += [
            (
                "inter-token latency p50, p99",
                f"{measured['inter_token_p50_ms']:.2f}, {measured['inter_token_p99_ms']:.2f} ms",
            ),
            ("decode", f"{measured['tokens_per_s']:.1f} tokens/s"),
            ("bytes sent per token and rank", f"{measured['bytes_sent_per_token']:,.0f}"),
            ("exchange's share of decode time", f"{100 * measured['exchange_share']:.0f} %"),
        ]
    rows.append(("key/value cache per rank", f"{measured['kv_bytes_per_rank'] / 2**20:.2f} MiB"))
    for row in rows:
        result.add_row(*row)
    return result


def verdict(
    arguments: argparse.Namespace,
    prompt: Prompt,
    completion: str,
    tokens: Sequence[int],
    console: Console,
) -> int:
    """Says whether the answer is right and the tokens are the expected ones; the exit status."""
    status = 0
    if prompt.key is not None:
        from ..passkey import parse_answer

        if parse_answer(completion) == prompt.key:
            console.print(f"The hidden key is {prompt.key}: found.", style="green")
        else:
            # The model's mistake, not the program's: no error.
            console.print(
                f"The hidden key is {prompt.key}: the model did not find it. "
                f"Its answer was {completion!r}.",
                style="yellow",
                markup=False,
            )
    if arguments.same_tokens_as is not None:
        expected = read_tokens(arguments.same_tokens_as)
        if list(tokens) == expected:
            console.print(f"The same {len(expected)} tokens as in {arguments.same_tokens_as}.")
        else:
            console.print(
                f"Other tokens than in {arguments.same_tokens_as}: "
                f"{list(tokens)}, there {expected}",
                style="red",
                markup=False,
            )
            status = 1
    return status


def read_tokens(path: Path) -> list[int]:
    try:
        return list(json.loads(path.read_text())["tokens"])
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(
            f"--same-tokens-as {path} is no file that --json wrote: {error}"
        ) from error
