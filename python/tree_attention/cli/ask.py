# SPDX-License-Identifier: BSD-3-Clause
"""`tree-attention ask`: answers to questions about a document that `prepare` has read.

Arguments and files are looked at before torch and transformers are imported, which takes seconds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._json import replace_file
from .document import INDEX, facts_of, place, sizes_in
from .generate import (
    add_model_options,
    advice,
    cache_options,
    check_model_options,
    check_new_tokens,
    check_read_by_all,
    load_model,
    start,
    text_in,
    text_of,
)
from .usage import (
    UsageError,
    argument_parser,
    check_can_be_written,
    check_checkpoint,
    plain_console,
    writing,
)

if TYPE_CHECKING:
    import torch

    from .shares import Part

_QUESTION = "{question}"
_FORMAT = f"\n\nQuestion: {_QUESTION}\nAnswer:"


def main(arguments: list[str]) -> int:
    return start(arguments, parse, check, run)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argument_parser(
        "ask",
        "Prints the answers to questions about a document that prepare has read, in the order of "
        "the questions, which are asked in as few batches as their lengths allow. The number of "
        "ranks may be another one.",
        'ask report "Who wrote it?" "When?" --model DIR',
        "ask report --model DIR --questions questions.txt --ranks 2 --json answers.json",
        f'ask report "Who wrote it?" --model DIR --format " Q: {_QUESTION} A:"',
    )
    parser.add_argument("document", type=Path, metavar="DIR", help="Directory that prepare wrote.")
    parser.add_argument(
        "question",
        nargs="*",
        metavar="QUESTION",
        help="Question to ask, if there is no --questions.",
    )
    parser.add_argument(
        "--questions",
        type=Path,
        metavar="FILE",
        help="File with a question on each line, in UTF-8.",
    )
    parser.add_argument(
        "--format",
        metavar="TEXT",
        help=f"Text that follows the document, with {_QUESTION} where each question goes (default: "
        '"Question:", the question, and "Answer:" on the next line).',
    )
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        default=64,
        metavar="N",
        help="Largest number of tokens to generate (default: 64).",
    )
    add_model_options(parser)
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="File to write the tokens and the measurements to (default: none).",
    )
    parser.set_defaults(command="ask", attention="tree_attention", shares="even")
    return parser.parse_intermixed_args(arguments)  # questions may follow options


def check(arguments: argparse.Namespace) -> None:
    """Raises UsageError for options that are wrong, or wrong together."""
    check_new_tokens(arguments)
    check_model_options(arguments)
    if arguments.json is not None:
        check_can_be_written("--json", arguments.json)
    check_checkpoint(arguments.model)
    given = arguments.format
    arguments.format = _FORMAT if given is None else text_of("--format", given)
    if _QUESTION not in arguments.format:
        raise UsageError(f"--format must have {_QUESTION} in it, got {arguments.format!r}")
    texts = [text_of("QUESTION", text) for text in arguments.question]
    file = arguments.questions
    check_read_by_all("--questions", file, arguments.ranks)
    if file is not None:
        texts += text_in("--questions", file).splitlines()
    if not texts:
        raise UsageError("there is no question: write one after DIR, or give --questions FILE")
    for number, text in enumerate(texts, 1):
        if not text.strip():
            raise UsageError(f"question {number} of {len(texts)} is blank: leave it out")
    arguments.texts = texts
    size, sizes = arguments.tensor_parallel_size, sizes_in(arguments.document)
    if not sizes:
        raise UsageError(
            f"no document was prepared in {arguments.document}, or it never ended: DIR is what "
            "--out of prepare named"
        )
    if size not in sizes:
        raise UsageError(
            f"--tensor-parallel-size must be {sizes[0]}, with which {arguments.document} was "
            f"prepared, got {size}"
        )


def run(arguments: argparse.Namespace, part: Part, device: torch.device) -> int:
    from ..exchange import ExchangeError, get_communicator, on_every_rank
    from .checkpoint import load_tokenizer, make_greedy, num_positions, pad_token

    tokenizer = load_tokenizer(arguments.model)
    model = load_model(arguments, part, device)
    make_greedy(model, arguments.model)
    import torch

    from .. import hf
    from ..hf.cache.snapshot.index import read_entries

    directory = place(arguments.document, arguments.tensor_parallel_size, part.world.rank)
    begin = time.perf_counter()

    def read() -> tuple[Any, tuple[list[int], str]]:
        entries = read_entries(directory / INDEX)
        ids = _tokens_of(entries, arguments, model)
        digest = hashlib.sha256(str(ids).encode()).hexdigest()
        return (("tokens of the document", digest),), (ids, entries["sha256"])

    try:
        # Ranks that split the heads read a directory each, and one of these may be older.
        comm = get_communicator(part.group)
        (document, sha256), _ = on_every_rank("ask", comm, arguments.timeout, read)
        with device:  # of states, which are made as the model's tensors are
            cache = hf.TreeCache.load(
                directory, model.config, **cache_options(arguments, part, model)
            )

        def check_same() -> tuple[Any, None]:
            if read_entries(directory / INDEX)["sha256"] != sha256:
                raise ValueError("another prepare has just replaced it: ask again")
            return (), None

        on_every_rank("ask", comm, arguments.timeout, check_same)
    except (OSError, ValueError) as error:
        raise UsageError(f"the document in {arguments.document} does not load: {error}") from error
    load_seconds = time.perf_counter() - begin
    answers = _Answers(part.world.root, arguments, model, tokenizer)
    questions = [
        tokenizer(arguments.format.replace(_QUESTION, text), add_special_tokens=False)["input_ids"]
        for text in arguments.texts
    ]
    for number, ids in enumerate(questions, 1):
        if not ids:
            raise UsageError(f"question {number} of {len(questions)} has no tokens: leave it out")
    limit = num_positions(model.config)
    longest = len(document) + max(map(len, questions)) + arguments.max_new_tokens
    if limit is not None and longest > limit:
        raise UsageError(
            f"the document, the longest question and {arguments.max_new_tokens} new tokens have "
            f"{longest} tokens, but the model has {limit} positions: shorten the question or "
            "--max-new-tokens"
        )
    pad = pad_token(tokenizer)
    num_bytes = 0
    for rows in _batches([len(ids) for ids in questions], _largest_hole(cache)):
        width = max(len(questions[row]) for row in rows)
        own = torch.full((len(rows), width), pad or 0, device=device)
        is_own = torch.zeros_like(own)
        for number, row in enumerate(rows):
            own[number, -len(questions[row]) :] = torch.tensor(questions[row], device=device)
            is_own[number, -len(questions[row]) :] = 1
        common = torch.tensor([document], device=device).expand(len(rows), -1)
        ids = torch.cat((common, own), dim=1)
        mask = torch.cat((torch.ones_like(common), is_own), dim=1)
        shared = cache.share(len(rows))
        answers.rows = rows
        try:
            with torch.inference_mode():
                model.generate(
                    input_ids=ids,
                    attention_mask=mask,
                    streamer=answers,
                    max_new_tokens=arguments.max_new_tokens,
                    do_sample=False,
                    pad_token_id=pad,
                    **{hf.CACHE_NAME: shared},
                )
        except ExchangeError as error:
            raise ExchangeError(f"{error}. {advice(model, shared)}") from error
        num_bytes = max(num_bytes, shared.num_bytes)
    if part.world.root and arguments.json is not None:
        content = {
            "document_tokens": len(document),
            "world_size": part.world.size,
            "load_s": load_seconds,
            "ttft_s": answers.first_seconds,
            "kv_bytes_per_rank": num_bytes,
            "questions": [
                {"question": text, "tokens": tokens, "answer": answers.text(tokens)}
                for text, tokens in zip(arguments.texts, answers.tokens, strict=True)
            ],
        }
        with writing("--json", arguments.json):
            replace_file(arguments.json, json.dumps(content, indent=1) + "\n")
    return 0


def _tokens_of(entries: dict[str, Any], arguments: argparse.Namespace, model: Any) -> list[int]:
    """The tokens of a document that was read with the same weights, or ValueError."""
    tokens, facts = entries.get("tokens"), entries.get("facts")
    if tokens is None or not isinstance(facts, dict):
        raise ValueError("it is a cache that prepare did not write")
    for name, value in facts_of(arguments, model).items():
        if facts.get(name) != value:
            raise ValueError(
                f"it was read with other weights: the {name} was {facts.get(name)!r}, and is "
                f"{value!r} of {arguments.model}; prepare it again, or name the model that read it"
            )
    return list(tokens)


def _largest_hole(cache: Any) -> int | None:
    """The most by which questions of one batch may differ in length, or None for any length."""
    from ..hf.cache.window import MARGIN

    layers = cache.kv_layers
    if cache.state_layers or any(layer.index_columns > 0 for layer in layers):
        return 0  # layers with a state and indices that choose keys see around none
    return MARGIN if any(layer.window is not None for layer in layers) else None


def _batches(lengths: Sequence[int], most: int | None) -> Iterator[list[int]]:
    """Numbers of questions that are asked together, whose lengths differ by at most `most`."""
    left = sorted(range(len(lengths)), key=lambda row: (lengths[row], row))
    while left:
        least = lengths[left[0]]
        yield [row for row in left if most is None or lengths[row] <= least + most]
        left = [row for row in left if most is not None and lengths[row] > least + most]


class _Answers:
    """A streamer of `generate` that prints each answer that has ended, on the root, once those to
    the questions before it have."""

    def __init__(
        self, root: bool, arguments: argparse.Namespace, model: Any, tokenizer: Any
    ) -> None:
        self.rows: list[int] = []  # the questions of the batch
        self.tokens: list[list[int]] = [[] for _ in arguments.texts]
        self.first_seconds = 0.0
        self._texts, self._most = arguments.texts, arguments.max_new_tokens
        ends = model.generation_config.eos_token_id
        self._ends = set(ends if isinstance(ends, list) else [ends])
        self._tokenizer = tokenizer
        self._console = plain_console(quiet=not root)
        self._remarks = plain_console(quiet=not root, stderr=True)
        self._num_printed, self._is_prompt = 0, True
        self._begin = time.perf_counter()

    def put(self, value: Any) -> None:
        if self._is_prompt:  # generate puts the prompts first
            self._is_prompt = False
            return
        self.first_seconds = self.first_seconds or time.perf_counter() - self._begin
        for row, token in zip(self.rows, value.tolist(), strict=True):
            if not self._has_ended(row):
                self.tokens[row].append(token)
        while self._num_printed < len(self._texts) and self._has_ended(self._num_printed):
            self._remarks.print(f"Question: {self._texts[self._num_printed]}", style="dim")
            self._console.out(self.text(self.tokens[self._num_printed]).strip())
            self._num_printed += 1

    def end(self) -> None:
        self._is_prompt = True

    def text(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))

    def _has_ended(self, row: int) -> bool:
        tokens = self.tokens[row]
        return len(tokens) == self._most or (len(tokens) > 0 and tokens[-1] in self._ends)
