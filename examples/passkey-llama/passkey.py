# SPDX-License-Identifier: BSD-3-Clause
"""Passkey retrieval: a number hidden in real prose, asked for at the end.

The task of Mohtashami and Jaggi (https://arxiv.org/abs/2305.16300) with named keys, so that one
text can hold several: ``The pass key of the garden is 48213.`` somewhere in the prose and ``What is
the pass key of the garden?`` after it. Nothing in this module needs torch.
"""

from __future__ import annotations

import random
import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KEY_DIGITS = 5

LABELS = (
    "garden", "library", "chapel", "stable", "kitchen", "parlour", "cottage", "carriage",
    "bridge", "village", "church", "cellar", "tower", "orchard", "harbour", "school",
    "market", "museum", "theatre", "station", "office", "castle", "palace", "island",
    "forest", "river", "mountain", "valley", "meadow", "lake", "farm", "mill",
)  # fmt: skip

_ANSWER = re.compile(rf"(?<!\d)\d{{{KEY_DIGITS}}}(?!\d)")


def needle(label: str, key: str) -> str:
    """The sentence that tells a key."""
    return f" The pass key of the {label} is {key}. Remember it."


def question(label: str) -> str:
    """The question, up to the word before the answer."""
    return f"\nWhat is the pass key of the {label}? The pass key of the {label} is"


def answer(key: str) -> str:
    """What a model that knows the key says after `question` (then it ends the sequence)."""
    return f" {key}."


def is_held_out(key: str) -> bool:
    """Whether training never shows this key: one key in ten, spread by a multiplicative hash."""
    return (int(key) * 2654435761 % 2**32) // 64 % 10 == 0


def random_key(rng: random.Random, *, held_out: bool) -> str:
    """A random key of `KEY_DIGITS` digits from the held-out keys or from the training keys."""
    while True:
        key = str(rng.randrange(10 ** (KEY_DIGITS - 1), 10**KEY_DIGITS))
        if is_held_out(key) == held_out:
            return key


def parse_answer(completion: str) -> str | None:
    """The key that a completion names: its first number of exactly `KEY_DIGITS` digits, or None."""
    match = _ANSWER.search(completion)
    return match.group() if match else None


@dataclass(frozen=True)
class PasskeyPrompt:
    """A prompt with its answer."""

    text: str
    input_ids: list[int]  # the tokens of `text`, special tokens included
    label: str
    key: str
    depth: float  # where the key's sentence stands in the prose: 0 is before it, 1 after it

    def grade(self, completion: str) -> bool:
        """Whether a completion of this prompt names the key."""
        return parse_answer(completion) == self.key


class Haystack:
    """Prose as tokens, with the places where a sentence can be put in without changing the others.

    A cut is safe before a token that begins with a space and a letter: the pre-tokenizer splits
    there whatever the neighbours are, so the joined text has the joined tokens.
    """

    def __init__(self, text: str, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        pieces = tokenizer.convert_ids_to_tokens(self.ids)
        words = [i for i, p in enumerate(pieces) if i and p[0] == "Ġ" and p[1:2].isalpha()]
        self._word_starts = frozenset(words)
        self.clause_starts = [i for i in words if pieces[i - 1][-1] in ".!?;:,"]
        self.sentence_starts = [
            i for i in words if pieces[i - 1][-1] in ".!?" and pieces[i][1].isupper()
        ]
        if not self.sentence_starts:
            raise ValueError("the haystack text has no sentence that could start a prompt")

    @classmethod
    def from_directory(cls, directory: str | Path, tokenizer: Any) -> Haystack:
        """The text of all ``*.txt`` files of a directory, in the order of their names."""
        files = sorted(Path(directory).glob("*.txt"))
        if not files:
            raise FileNotFoundError(f"no *.txt files with prose in {directory}")
        return cls("\n".join(f.read_text(encoding="utf-8") for f in files), tokenizer)

    def window(self, length: int, rng: random.Random) -> int:
        """A random start: `ids[start : start + length]` begins a sentence and ends with a word."""
        last = bisect_right(self.sentence_starts, len(self.ids) - 1 - length)
        starts = [s for s in self.sentence_starts[:last] if s + length in self._word_starts]
        if not starts:
            raise ValueError(
                f"the haystack text has {len(self.ids)} tokens: too few for {length} tokens of it"
            )
        return rng.choice(starts)

    def cut(self, start: int, length: int, depth: float) -> int:
        """The place nearest to `depth` of a window where a sentence can be put in."""
        if depth <= 0:
            return start
        if depth >= 1:
            return start + length
        target = start + round(depth * length)
        i = bisect_left(self.clause_starts, target)
        near = [start, start + length, *self.clause_starts[max(0, i - 1) : i + 1]]
        inside = (p for p in near if start <= p <= start + length)
        return min(inside, key=lambda p: abs(p - target))


def build_prompt(
    haystack: Haystack,
    tokens: int,
    *,
    depth: float = 0.5,
    seed: int = 0,
    distractors: int = 0,
) -> PasskeyPrompt:
    """A prompt of exactly `tokens` tokens with a held-out key hidden at `depth` of the prose.

    Args:
        haystack: The prose and the tokenizer.
        tokens: Length of the prompt, special tokens and question included.
        depth: Where the sentence with the key goes, from 0 (first) to 1 (last); it moves to the
            nearest end of a clause.
        seed: Chooses label, key, prose and the places of distractors.
        distractors: How many other keys with other labels are hidden at random places.

    Raises:
        ValueError: `tokens` leaves no room for prose, or the haystack is too short.
    """
    if not 0 <= distractors < len(LABELS):
        raise ValueError(f"distractors must be from 0 to {len(LABELS) - 1}, got {distractors}")
    if not 0.0 <= depth <= 1.0:
        raise ValueError(f"depth must be from 0 to 1, got {depth}")
    rng = random.Random(f"{seed}/{tokens}/{depth}/{distractors}")
    tokenizer = haystack.tokenizer
    labels = rng.sample(LABELS, distractors + 1)
    keys = [random_key(rng, held_out=True) for _ in labels]
    while len(set(keys)) < len(keys):
        keys = [random_key(rng, held_out=True) for _ in labels]
    depths = [depth] + [rng.random() for _ in range(distractors)]

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    needles = [encode(needle(label, key)) for label, key in zip(labels, keys, strict=True)]
    asked = encode(question(labels[0]))
    special = len(tokenizer("")["input_ids"])
    prose = tokens - special - sum(map(len, needles)) - len(asked)
    if prose < 1:
        raise ValueError(f"a prompt needs at least {tokens - prose + 1} tokens, got {tokens}")
    start = haystack.window(prose, rng)
    cuts = sorted((haystack.cut(start, prose, d), i) for i, d in enumerate(depths))
    body = hide(haystack.ids, start, start + prose, [(at, needles[i]) for at, i in cuts])
    text = tokenizer.decode(body + asked)
    return PasskeyPrompt(text, tokenizer(text)["input_ids"], labels[0], keys[0], depth)


def hide(
    ids: Sequence[int], begin: int, end: int, needles: Sequence[tuple[int, Sequence[int]]]
) -> list[int]:
    """`ids[begin:end]` with each needle put in before its place; places are in increasing order."""
    body: list[int] = []
    for at, tokens in needles:
        body += ids[begin:at]
        body += tokens
        begin = at
    body += ids[begin:end]
    return body
