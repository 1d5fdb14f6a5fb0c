# SPDX-License-Identifier: BSD-3-Clause
"""The passkey example: its prompts, its checkpoint and the programs that made and ask it."""

import argparse
import json
import random
import re
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

import ask
import evaluate_passkey
import passkey
import passkey_text
import train_passkey
from passkey import Haystack, build_prompt
from ranks_of_commands import started
from tree_attention.hf import parts

ROOT = Path(__file__).resolve().parents[2]
CHECKPOINT = ROOT / "examples" / "passkey-llama"
TOKENIZER = AutoTokenizer.from_pretrained(CHECKPOINT, local_files_only=True)
HAYSTACK = Haystack.from_directory(CHECKPOINT / "text", TOKENIZER)


@pytest.fixture(scope="module")
def model():
    loaded = AutoModelForCausalLM.from_pretrained(
        CHECKPOINT, local_files_only=True, attn_implementation="sdpa"
    )
    return loaded.eval()


# ---- prompts


@given(
    tokens=st.integers(200, 3000),
    depth=st.floats(0, 1),
    seed=st.integers(0, 2**32),
    distractors=st.integers(0, 4),
)
def test_prompt_has_the_length_the_depth_and_one_key(tokens, depth, seed, distractors):
    prompt = build_prompt(HAYSTACK, tokens, depth=depth, seed=seed, distractors=distractors)
    assert len(prompt.input_ids) == tokens
    assert TOKENIZER(prompt.text)["input_ids"] == prompt.input_ids
    assert passkey.is_held_out(prompt.key)
    sentence = passkey.needle(prompt.label, prompt.key)
    assert prompt.text.count(sentence) == 1
    assert prompt.text.count(prompt.key) == 1
    assert prompt.text.count(". Remember it.") == 1 + distractors
    assert prompt.text.endswith(passkey.question(prompt.label))

    prose = prompt.text.removesuffix(passkey.question(prompt.label))
    before = TOKENIZER(prose.partition(sentence)[0], add_special_tokens=False)["input_ids"]
    after = TOKENIZER(prose.partition(sentence)[2], add_special_tokens=False)["input_ids"]
    # A clause of the prose has fewer than 100 tokens, a distractor's sentence fewer than 25.
    assert abs(len(before) - depth * (len(before) + len(after))) <= 100 + 25 * distractors


@pytest.mark.parametrize("depth", [0.0, 1.0])
def test_edge_depths_leave_no_prose_outside(depth):
    prompt = build_prompt(HAYSTACK, 300, depth=depth, seed=1)
    sentence = passkey.needle(prompt.label, prompt.key)
    if depth == 0:
        assert prompt.text.startswith(sentence)
    else:
        assert prompt.text.endswith(sentence + passkey.question(prompt.label))


def test_prompts_are_reproducible_and_differ_by_seed():
    first, again, other = (build_prompt(HAYSTACK, 500, seed=seed) for seed in (3, 3, 4))
    assert first == again
    assert first.text != other.text


def test_one_key_in_ten_is_held_out():
    keys = [str(key) for key in range(10000, 100000)]
    assert 0.095 < sum(map(passkey.is_held_out, keys)) / len(keys) < 0.105
    rng = random.Random(0)
    for held_out in (False, True):
        drawn = [passkey.random_key(rng, held_out=held_out) for _ in range(50)]
        assert all(passkey.is_held_out(key) == held_out for key in drawn)


@pytest.mark.parametrize(
    ("completion", "key"),
    [
        (" 48213.", "48213"),
        ("It is 48213, I think, not 11111.", "48213"),
        ("1234 and 123456 and 48213", "48213"),
        (" 482134.", None),
        (" 4821", None),
        ("", None),
    ],
)
def test_parse_answer(completion, key):
    assert passkey.parse_answer(completion) == key


def test_grade():
    prompt = build_prompt(HAYSTACK, 100)
    assert prompt.grade(passkey.answer(prompt.key))
    assert not prompt.grade(passkey.answer(prompt.key[::-1] + "0"))
    assert not prompt.grade(" unknown.")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": 20}, r"a prompt needs at least \d+ tokens, got 20"),
        ({"tokens": 10**6}, r"has \d+ tokens: too few for \d+ tokens of it"),
        ({"tokens": 500, "depth": 1.5}, "depth must be from 0 to 1, got 1.5"),
        ({"tokens": 500, "distractors": 32}, "distractors must be from 0 to 31, got 32"),
    ],
)
def test_impossible_prompts_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        build_prompt(HAYSTACK, **arguments)


def test_missing_prose_is_named(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=re.escape(f"no *.txt files with prose in {tmp_path}")
    ):
        Haystack.from_directory(tmp_path, TOKENIZER)
    (tmp_path / "list.txt").write_text("no sentence at all")
    with pytest.raises(ValueError, match="no sentence that could start a prompt"):
        Haystack.from_directory(tmp_path, TOKENIZER)


# ---- the checkpoint


def test_checkpoint_has_the_ordinary_layout(model):
    assert sum(f.stat().st_size for f in CHECKPOINT.rglob("*") if f.is_file()) <= 4 * 2**20
    assert type(model).__name__ == "LlamaForCausalLM"
    assert 0.8e6 < model.num_parameters() < 1.1e6
    assert model.dtype == torch.float32
    assert len(TOKENIZER) == model.config.vocab_size == 1024
    assert all(len(TOKENIZER.tokenize(digit)) == 1 for digit in "0123456789")
    assert all(len(TOKENIZER.tokenize(f" {label}")) == 1 for label in passkey.LABELS)
    accents = "naïve café, 1,234 €\n"
    assert TOKENIZER.decode(TOKENIZER(accents, add_special_tokens=False)["input_ids"]) == accents


@pytest.mark.deep
def test_checkpoint_answers_held_out_prompts(model):
    """Greedy decoding with the cache, as a user runs it; one miss in twelve is allowed."""
    right = 0
    for tokens in (1000, 2000):
        for depth in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
            prompt = build_prompt(HAYSTACK, tokens, depth=depth, seed=1000)
            ids = torch.tensor([prompt.input_ids])
            output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=10)
            completion = output[0, ids.shape[1] :]
            assert len(completion) <= 10
            right += prompt.grade(TOKENIZER.decode(completion, skip_special_tokens=True))
    assert right >= 11


def test_committed_evaluation_reaches_the_targets():
    report = json.loads((CHECKPOINT / "evaluation.json").read_text())
    rows = {(row["tokens"], row["distractors"]): row for row in report["rows"]}
    assert min(rows[2000, 0]["right_at_depth"]) >= 0.95 * rows[2000, 0]["prompts_per_depth"]
    assert rows[8000, 0]["right"] >= 0.90 * rows[8000, 0]["prompts"]
    assert (16000, 0) in rows
    assert any(distractors for _, distractors in rows)
    assert evaluate_passkey.table(report["rows"]) in (CHECKPOINT / "README.md").read_text()


# ---- the programs


def test_exact_answers_are_those_of_greedy_decoding(model):
    prompts = [build_prompt(HAYSTACK, 600, depth=seed / 3, seed=seed) for seed in range(4)]
    wrong = passkey.PasskeyPrompt(prompts[0].text, prompts[0].input_ids, "mill", "98765", 0.0)
    ids = torch.tensor([prompt.input_ids for prompt in prompts])
    outputs = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=7)
    greedy = [
        TOKENIZER.decode(output[ids.shape[1] :]) == passkey.answer(prompt.key)
        for output, prompt in zip(outputs, prompts, strict=True)
    ]
    exact = evaluate_passkey.answers_exactly(model, TOKENIZER, [*prompts, wrong])
    assert exact == [*greedy, False]


@pytest.mark.deep
def test_interrupted_training_goes_on_exactly(monkeypatch, tmp_path):
    stages = (train_passkey.Stage(128, 2, 2), train_passkey.Stage(256, 2, 3))
    monkeypatch.setattr(train_passkey, "STAGES", stages)
    monkeypatch.setattr(train_passkey, "TOKENS_PER_STEP", 512)
    examples = train_passkey.Examples([HAYSTACK], seed=0)
    plain_step = train_passkey.train_step

    def new_model():
        torch.manual_seed(0)
        return train_passkey.make_model(TOKENIZER)

    def arguments(name, resume):
        directory = tmp_path / name
        directory.mkdir(exist_ok=True)
        return argparse.Namespace(output=directory, save_every=2, resume=resume)

    whole = new_model()
    log = train_passkey.train(arguments("whole", False), whole, examples)
    assert [row["length"] for row in log] == [128, 128, 256, 256]

    steps = 0

    def interrupted_step(*args):
        nonlocal steps
        steps += 1
        if steps == 4:
            raise KeyboardInterrupt
        return plain_step(*args)

    monkeypatch.setattr(train_passkey, "train_step", interrupted_step)
    with pytest.raises(KeyboardInterrupt):
        train_passkey.train(arguments("stopped", False), new_model(), examples)
    monkeypatch.setattr(train_passkey, "train_step", plain_step)
    resumed = new_model()
    again = train_passkey.train(arguments("stopped", True), resumed, examples)
    assert [row["answer_loss"] for row in again] == [row["answer_loss"] for row in log]
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name]), name

    with pytest.raises(SystemExit, match=r"--resume: there is no .*state\.pt; start without it"):
        train_passkey.train(arguments("new", True), new_model(), examples)


def test_training_sequences_ask_every_key_and_skip_positions():
    examples = train_passkey.Examples([HAYSTACK], seed=0)
    for step, stage in enumerate(train_passkey.STAGES):
        batch = examples.batch(step, stage)
        sequences = max(1, train_passkey.TOKENS_PER_STEP // stage.length)
        assert batch["ids"].shape == (sequences, stage.length)
        for ids, answers, positions in zip(*batch.values(), strict=True):
            text = TOKENIZER.decode(ids)
            told = dict(re.findall(r"key of the (\w+) is (\d{5})\. Remember", text))
            asked = re.findall(r"What is the pass key of the (\w+)\?", text)
            assert sorted(told) == sorted(asked)
            assert not any(map(passkey.is_held_out, told.values()))
            said = "".join(f"{passkey.answer(told[label])}</s>" for label in asked)
            assert TOKENIZER.decode(ids[answers]) == said
            assert positions[0] == 0
            assert (positions.diff() >= 1).all()
            assert positions[-1] < train_passkey.MAX_POSITIONS
        both = torch.cat([batch["positions"], examples.batch(step + 1, stage)["positions"]])
        skipped = (both[:, -1] >= stage.length).float().mean()
        assert skipped == (0.5 if stage.length >= 256 else 0)


def _r_characters(lines):
    """A character vector as R's serialize(xdr = TRUE) of version 3 writes it."""
    data = b"X\n" + struct.pack(">iiii", 3, 0x040201, 0x030500, 5) + b"UTF-8"
    data += struct.pack(">ii", 16, len(lines))
    for line in lines:
        data += struct.pack(">ii", 0x040009, len(line.encode())) + line.encode()
    return data


def test_novels_are_read_from_r_objects(tmp_path):
    titles = passkey_text.TRAINING + passkey_text.HELD_OUT
    chunks = b""
    for title in [*titles, "SANDITON"]:
        lines = [title, "", "by", "", "CHAPTER I", "", "A _very_ long", "  paragraph.", "", "Café."]
        compressed = zlib.compress(_r_characters(lines))
        chunks += struct.pack(">I", len(compressed)) + compressed
    path = tmp_path / "Rdata.rdb"
    path.write_bytes(chunks)
    novels = passkey_text.read_novels(path)
    assert sorted(novels) == sorted(titles)
    assert novels["EMMA"] == "EMMA\nby\nCHAPTER I\nA very long paragraph.\nCafé.\n"
    assert passkey_text.excerpt(novels["EMMA"], 12) == "CHAPTER I\nA very long paragraph.\n"

    path.write_bytes(struct.pack(">I", len(compressed)) + compressed)
    with pytest.raises(ValueError, match="lacks EMMA, MANSFIELD PARK"):
        passkey_text.read_novels(path)


def test_missing_text_package_is_explained(monkeypatch, tmp_path):
    def no_network(*args, **kwargs):
        raise subprocess.CalledProcessError(100, "apt-get")

    monkeypatch.setattr(passkey_text, "RDB", Path("no/such/Rdata.rdb"))
    monkeypatch.setattr(subprocess, "run", no_network)
    with pytest.raises(SystemExit, match="comes from Debian's package r-cran-janeaustenr"):
        passkey_text.find_package(tmp_path)


def check_answer(output, world_size):
    prompt = build_prompt(HAYSTACK, 600)
    assert output.count(f": {prompt.key}.") == 2
    assert "The hidden key, and the same tokens." in output
    assert ("2 processes, 1/2 of the cache each" in output) == (world_size == 2)


def test_ask_finds_the_key_with_the_tokens_of_transformers(monkeypatch, capsys):
    assert run_ask(monkeypatch, "--tokens", "600") == 0
    check_answer(capsys.readouterr().out, 1)


PROGRAM = f"""
import sys
sys.path.insert(0, {str(CHECKPOINT)!r})
import ask
sys.exit(ask.main())
"""


@pytest.mark.deep
def test_two_processes_find_the_key():
    arguments = ("--tokens", "600")
    with started(arguments, program=PROGRAM, variables={"COLUMNS": "200"}) as ranks:
        ended = [ranks.wait_for_end(rank) for rank in range(2)]
    assert [rank.status for rank in ended] == [0, 0], ended
    check_answer(ended[0].stdout + ended[1].stdout, 2)


def test_ask_fails_when_the_tokens_differ(monkeypatch, capsys):
    """A wrong sign in the attention must not pass for right."""
    right = parts.lean_decode

    def wrong(q, k, v, ranges, **options):
        return right(q, k, -v, ranges, **options)

    monkeypatch.setattr(parts, "lean_decode", wrong)
    assert run_ask(monkeypatch, "--tokens", "300") == 1
    assert "WRONG: the tokens differ" in capsys.readouterr().out


def test_ask_refuses_an_impossible_prompt(monkeypatch, capsys):
    with pytest.raises(SystemExit) as error:
        run_ask(monkeypatch, "--depth", "2")
    assert error.value.code == 2
    assert "depth must be from 0 to 1, got 2.0" in capsys.readouterr().err


def run_ask(monkeypatch, *arguments):
    """The program in this process; its exit status."""
    monkeypatch.setattr(sys, "argv", ["ask.py", *arguments])
    monkeypatch.setenv("COLUMNS", "200")
    return ask.main()
