#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""Train the passkey model from scratch on one CPU core.

    OMP_NUM_THREADS=1 python examples/passkey-llama/train_passkey.py --output build/passkey
    python examples/passkey-llama/train_passkey.py --output build/passkey --resume  # after a stop

A Llama of 0.9 M parameters learns to read a number out of prose. Sequences grow from 128 to 8,192
tokens, 4,096 tokens per step; all the labelled keys in a text are asked. From length 256 on half of
the sequences have gaps in their position ids (PoSE, https://arxiv.org/abs/2309.10400), so that the
distances of 16,000 tokens are trained at the cost of short sequences. The checkpoint is written to
OUTPUT/checkpoint and to --publish; evaluate_passkey.py measures it there.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

import passkey
from passkey import Haystack
from passkey_text import HELD_OUT, TRAINING, excerpt, find_package, read_novels
from passkey_tokenizer import MAX_POSITIONS, VOCABULARY, make_tokenizer

HERE = Path(__file__).resolve().parent
TOKENS_PER_STEP = 4096
WARMUP_STEPS = 40
LM_WEIGHT = 0.3
EDGE_SHARE = 0.15  # of the keys at the very start, and as many at the very end
HELD_OUT_CHARACTERS = 75_000


@dataclass(frozen=True)
class Stage:
    length: int
    steps: int
    keys: int
    """The most keys in one text."""
    fewest_keys: int = 1
    first_digit: float = 1.0
    """Weight of a key's first digit in the loss: finding the key is harder than copying on."""
    decay: bool = False
    """Whether the learning rate falls along a cosine to a tenth in this stage."""

    @property
    def learning_rate(self) -> float:
        return 2e-3 * (128 / self.length) ** 0.25


# Grown while training: after eight stages the model copied but began at a wrong digit. Weighing the
# first digit and one key per text cured that; the last four stages make long prompts reliable.
STAGES = (
    Stage(128, 600, 2),
    Stage(256, 150, 3),
    Stage(512, 120, 5),
    Stage(2048, 220, 10, decay=True),
    Stage(256, 285, 3),
    Stage(256, 175, 5, fewest_keys=4),
    Stage(512, 120, 3),
    Stage(2048, 120, 2, decay=True),
    Stage(256, 110, 3, first_digit=6),
    Stage(512, 120, 1, first_digit=6),
    Stage(2048, 110, 1, first_digit=6, decay=True),
    Stage(4096, 50, 1, first_digit=6),
    Stage(8192, 40, 1, first_digit=6, decay=True),
    Stage(1024, 200, 1, first_digit=6),
    Stage(4096, 80, 1, first_digit=6, decay=True),
)


def make_model(tokenizer: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        tie_word_embeddings=True,
        initializer_range=0.06,  # with the usual 0.02 copying had not begun after 400 steps
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config)
    model.generation_config.do_sample = False
    return model


class Examples:
    """Random training sequences; the same step of the same seed always gives the same batch."""

    def __init__(self, haystacks: list[Haystack], seed: int) -> None:
        self.haystacks = haystacks
        self.tokenizer = haystacks[0].tokenizer
        self.seed = seed
        self.encoded: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def encode_label(self, text: str) -> list[int]:
        if text not in self.encoded:
            self.encoded[text] = self.encode(text)
        return self.encoded[text]

    def sequence(self, stage: Stage, rng: random.Random) -> tuple[list[int], list[bool], list[int]]:
        """Tokens, which of them are answers, and where a gap in the positions splits no key."""
        count = rng.randint(stage.fewest_keys, stage.keys)
        labels = rng.sample(passkey.LABELS, count)
        keys = [passkey.random_key(rng, held_out=False) for _ in labels]
        needles = [self.encode(passkey.needle(a, k)) for a, k in zip(labels, keys, strict=True)]
        tail: list[int] = []
        tail_answers: list[bool] = []
        for i in rng.sample(range(count), count):
            asked = self.encode_label(passkey.question(labels[i]))
            said = [*self.encode(passkey.answer(keys[i])), self.tokenizer.eos_token_id]
            tail += asked + said
            tail_answers += [False] * len(asked) + [True] * len(said)
        prose = stage.length - 1 - sum(map(len, needles)) - len(tail)
        haystack = rng.choice(self.haystacks)
        starts = haystack.sentence_starts
        start = starts[rng.randrange(len(starts))]
        while start + prose > len(haystack.ids):
            start = starts[rng.randrange(len(starts))]
        cuts = []
        for i in range(count):
            edge = rng.random()
            depth = 0.0 if edge < EDGE_SHARE else 1.0 if edge > 1 - EDGE_SHARE else rng.random()
            cuts.append((haystack.cut(start, prose, depth), i))
        rng.shuffle(cuts)
        cuts.sort(key=lambda cut: cut[0])
        places = [(at, needles[i]) for at, i in cuts]
        body = passkey.hide(haystack.ids, start, start + prose, places)
        ids = [self.tokenizer.bos_token_id, *body, *tail]
        gaps, begin, shift = [], start, 1 - start
        for at, tokens in [*places, (start + prose, [])]:
            gaps += range(begin + shift, at + shift + 1)
            begin, shift = at, shift + len(tokens)
        return ids, [False] * (1 + len(body)) + tail_answers, gaps

    def positions(self, length: int, gaps: list[int], rng: random.Random) -> np.ndarray:
        """Position ids with gaps before a few of the tokens `gaps`, up to 8k to 16k in all."""
        steps = np.ones(length, dtype=np.int64)
        steps[0] = 0
        reach = int(8192 * 2 ** rng.random())
        spare = rng.randint(0, max(0, reach - length))
        cuts = rng.choices(gaps, k=rng.randint(1, 4))
        shares = np.array([rng.expovariate(1.0) for _ in cuts])
        for cut, share in zip(cuts, shares / shares.sum(), strict=True):
            steps[cut] += int(share * spare)
        return np.cumsum(steps)

    def batch(self, step: int, stage: Stage) -> dict[str, torch.Tensor]:
        rng = random.Random(f"{self.seed}/{step}")
        ids, answers, positions = [], [], []
        for i in range(max(1, TOKENS_PER_STEP // stage.length)):
            tokens, said, gaps = self.sequence(stage, rng)
            ids.append(tokens)
            answers.append(said)
            if stage.length >= 256 and (step + i) % 2 == 0:
                positions.append(self.positions(stage.length, gaps, rng))
            else:
                positions.append(np.arange(stage.length))
        return {
            "ids": torch.tensor(ids),
            "answers": torch.tensor(answers),
            "positions": torch.from_numpy(np.stack(positions)),
        }


def learning_rate(step: int) -> float:
    """Each stage's own rate, warmed up at the start of the first."""
    first = 0
    for stage in STAGES:
        if step < first + stage.steps:
            break
        first += stage.steps
    rate = stage.learning_rate * min(1.0, (step + 1) / WARMUP_STEPS)
    if stage.decay:
        rate *= 0.55 + 0.45 * float(np.cos(np.pi * (step - first) / stage.steps))
    return rate


def stage_of(step: int) -> Stage:
    for stage in STAGES:
        if step < stage.steps:
            return stage
        step -= stage.steps
    raise ValueError("step lies after the last stage")


def train_step(
    model: Any, optimizer: Any, batch: dict[str, torch.Tensor], first_digit: float
) -> dict[str, float]:
    ids, answers = batch["ids"], batch["answers"][:, 1:]
    # The mask of ones keeps transformers from taking a gap in the positions for packed sequences.
    logits = model(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        position_ids=batch["positions"],
        use_cache=False,
    ).logits[:, :-1]
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
    ).view_as(answers)
    # An answer is a space, the digits, a full stop and the end of the sequence.
    starts = answers & ~answers.roll(1, dims=1)
    weights = torch.where(starts.roll(1, dims=1), first_digit, 1.0)[answers]
    answer_loss = (losses[answers] * weights).sum() / weights.sum()
    lm_loss = losses[~answers].mean()
    optimizer.zero_grad(set_to_none=True)
    (answer_loss + LM_WEIGHT * lm_loss).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    right = (logits.argmax(-1) == ids[:, 1:])[answers].float().mean()
    return {
        "answer_loss": answer_loss.item(),
        "lm_loss": lm_loss.item(),
        "answer_tokens_right": right.item(),
    }


def save_state(path: Path, model: Any, optimizer: Any, log: list[dict[str, Any]]) -> None:
    temporary = path.with_suffix(".tmp")
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "log": log}, temporary
    )
    os.replace(temporary, path)


def train(args: argparse.Namespace, model: Any, examples: Examples) -> list[dict[str, Any]]:
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}],
        betas=(0.9, 0.98),
    )
    state = args.output / "state.pt"
    log: list[dict[str, Any]] = []
    if args.resume:
        if not state.exists():
            raise SystemExit(f"--resume: there is no {state}; start without it")
        saved = torch.load(state, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        log = saved["log"]
    total = sum(stage.steps for stage in STAGES)
    before = log[-1]["seconds"] if log else 0.0
    began = time.monotonic()
    with tqdm(total=total, initial=len(log), unit="step") as bar:
        for step in range(len(log), total):
            stage = stage_of(step)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step)
            figures = train_step(model, optimizer, examples.batch(step, stage), stage.first_digit)
            log.append(
                {"step": step, "length": stage.length, **figures}
                | {"seconds": before + time.monotonic() - began}
            )
            bar.update()
            bar.set_postfix_str(
                f"T={stage.length} answer={figures['answer_loss']:.3f} "
                f"lm={figures['lm_loss']:.2f} right={figures['answer_tokens_right']:.0%}"
            )
            if (step + 1) % args.save_every == 0 or step + 1 == total:
                save_state(state, model, optimizer, log)
    return log


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=HERE.parents[1] / "build" / "passkey")
    parser.add_argument("--publish", type=Path, default=HERE)
    parser.add_argument("--text-package", type=Path, help="folder with the unpacked .deb")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="more help only on idle cores")
    parser.add_argument("--save-every", type=int, default=25, metavar="STEPS")
    parser.add_argument("--resume", action="store_true", help="go on from OUTPUT/state.pt")
    parser.add_argument(
        "--prepare-only", action="store_true", help="write tokenizer, text and random weights"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    args.output.mkdir(parents=True, exist_ok=True)

    novels = read_novels(find_package(args.text_package or args.output / "package"))
    prose = [novels[title] for title in TRAINING]
    tokenizer = make_tokenizer(prose, args.seed)
    model = make_model(tokenizer)
    text = args.publish / "text"
    text.mkdir(parents=True, exist_ok=True)
    for title in HELD_OUT:
        name = title.lower().replace(" ", "-") + ".txt"
        (text / name).write_text(excerpt(novels[title], HELD_OUT_CHARACTERS), encoding="utf-8")
    if not args.prepare_only:
        examples = Examples([Haystack(novel, tokenizer) for novel in prose], args.seed)
        log = train(args, model, examples)
        (args.output / "log.json").write_text(json.dumps(log, indent=0))
    for directory in (args.output / "checkpoint", args.publish):
        tokenizer.save_pretrained(directory)
        model.save_pretrained(directory)


if __name__ == "__main__":
    main()
