# SPDX-License-Identifier: BSD-3-Clause
"""`prepare` and `ask`: every question is answered as `generate` answers the document and it alone,
and what is wrong ends with a sentence and leaves nothing half-written.

The mistakes these tests are for: answers in another order, a question that sees another one or its
padding, a document that other weights have read.
"""

from __future__ import annotations

import errno
import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ranks_of_commands import Ended, started
from tree_attention.__main__ import main

pytest.importorskip("transformers")

import hf_families
import hf_models
from tree_attention.hf.cache.snapshot.index import digest_of

TEXT = "Keys and values never move. Each rank keeps its share of them.\n" * 4
QUESTIONS = ["Who?", "What does each rank keep?", "Why"]
FORMAT = "\nQ: {question}\nA:"


@pytest.fixture(scope="module")
def document(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("documents")
    (directory / "text.txt").write_text(TEXT)
    out = directory / "out"
    model = "--model", str(checkpoint)
    assert main(["prepare", str(directory / "text.txt"), *model, "--out", str(out)]) == 0
    return out


def asked(checkpoint: Path, document: Path, *arguments: str) -> list[str]:
    model = "--model", str(checkpoint), "--format", FORMAT, "--max-new-tokens", "8"
    return ["ask", str(document), *model, *arguments]


def alone(checkpoint: Path, question: str, file: Path, *options: str) -> list[int]:
    text = TEXT + FORMAT.replace("{question}", question)
    options = "--model", str(checkpoint), "--max-new-tokens", "8", "--json", str(file), *options
    assert main(["generate", "--prompt", text, *options]) == 0
    return list(json.loads(file.read_text())["tokens"])


def on_ranks(world_size: int, arguments: list[str]) -> list[Ended]:
    with started(arguments, world_size) as ranks:
        return [ranks.wait_for_end(rank) for rank in range(world_size)]


def test_every_question_is_answered_as_it_is_alone(
    checkpoint: Path, document: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """In one process, and on other ranks than the document was read by, of which one prints."""
    wanted = [alone(checkpoint, text, tmp_path / "one.json") for text in QUESTIONS]
    capfd.readouterr()
    questions, file = tmp_path / "questions.txt", tmp_path / "answers.json"
    questions.write_text("\n".join(QUESTIONS[1:]) + "\n")
    more = QUESTIONS[0], "--questions", str(questions), "--json", str(file)
    arguments = asked(checkpoint, document, *more)
    for world_size in (1, 2):
        if world_size == 1:
            assert main(arguments) == 0
            output = capfd.readouterr().out
        else:
            first, second = on_ranks(2, arguments)
            assert (first.status, second.status) == (0, 0), (first, second)
            output = first.stdout
            assert second.stdout == ""
        said = json.loads(file.read_text())
        assert [x["question"] for x in said["questions"]] == QUESTIONS
        assert [x["tokens"] for x in said["questions"]] == wanted
        assert (said["document_tokens"], said["world_size"]) == (len(TEXT), world_size)
        assert min(said["load_s"], said["ttft_s"], said["kv_bytes_per_rank"]) > 0
        assert output == "".join(x["answer"].strip() + "\n" for x in said["questions"])


def _small_checkpoint(name: str, tokens: Path, directory: Path) -> Path:
    """A model of a kind, with the tokenizer of the other checkpoint."""
    sizes = {"vocab_size": 259, "max_position_embeddings": 1024, "eos_token_id": None}
    if name in hf_models.CONFIGS:
        model = hf_models.make_model(name, **sizes)
    else:
        family = {**hf_families.HYBRIDS, **hf_families.CHOOSING}[name]
        if not family.exists:
            pytest.skip(f"this release of transformers has no {name}")
        model = hf_families.make_model(replace(family, options=family.options | sizes))
    shutil.copytree(tokens, directory)
    model.save_pretrained(directory)
    return directory


@pytest.mark.deep
@pytest.mark.parametrize(
    "name, options, prepared_by, asked_by",
    [
        ("gemma2", ("--kv-dtype", "int8"), 2, 1),
        ("LFM2", (), 1, 2),
        ("llama", ("--tensor-parallel-size", "2"), 2, 4),
        ("llama", ("--weights", "replicated", "--kv-dtype", "fp8"), 3, 2),
        ("llama", ("--weight-dtype", "int8"), 1, 2),
        ("mistral_window", (), 1, 3),
        ("gpt_oss", (), 2, 3),
        ("deepseek", ("--kv-dtype", "int8"), 3, 1),
        ("Qwen3-Next", (), 2, 3),
        ("Jamba", (), 2, 1),
        ("DeepSeek-V3.2", (), 2, 1),
    ],
)
def test_documents_of_all_kinds_in_another_world(
    name: str,
    options: tuple[str, ...],
    prepared_by: int,
    asked_by: int,
    checkpoint: Path,
    tmp_path: Path,
) -> None:
    """Windows that have dropped slots, states, latents, weights that are split or quantised."""
    model = _small_checkpoint(name, checkpoint, tmp_path / "model")
    text, out, file = tmp_path / "text.txt", tmp_path / "out", tmp_path / "answers.json"
    text.write_text(TEXT)
    in_one = () if "--tensor-parallel-size" in options else options
    wanted = [alone(model, question, tmp_path / "one.json", *in_one) for question in QUESTIONS]
    assert len({tuple(tokens) for tokens in wanted}) > 1
    prepared = ["prepare", str(text), "--model", str(model), "--out", str(out), *options]
    ended = on_ranks(prepared_by, prepared)
    assert [end.status for end in ended] == [0] * prepared_by, ended
    ended = on_ranks(asked_by, [*asked(model, out, *QUESTIONS, "--json", str(file)), *options])
    assert [end.status for end in ended] == [0] * asked_by, ended
    said = json.loads(file.read_text())
    assert [x["tokens"] for x in said["questions"]] == wanted
    assert said["world_size"] == asked_by


def test_a_damaged_document_ends_every_rank(
    checkpoint: Path, document: Path, tmp_path: Path
) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(document, damaged)
    _cut(damaged)
    first, second = on_ranks(2, asked(checkpoint, damaged, "Who?"))
    assert first.status > 0 and second.status > 0
    assert "Traceback" not in first.stderr + second.stderr
    assert f"ask: the document in {damaged} does not load: " in first.stderr + second.stderr


@pytest.mark.deep
def test_halves_of_a_document_are_refused_by_all_ranks(checkpoint: Path, tmp_path: Path) -> None:
    """Of ranks that split the heads, some were lost before they had saved theirs."""
    model = _small_checkpoint("llama", checkpoint, tmp_path / "model")
    size = "--tensor-parallel-size", "2"
    for name, text in (("old", TEXT.upper()), ("new", TEXT)):
        (tmp_path / "text.txt").write_text(text)
        out = "--model", str(model), "--out", str(tmp_path / name)
        ended = on_ranks(2, ["prepare", str(tmp_path / "text.txt"), *out, *size])
        assert [end.status for end in ended] == [0, 0], ended
    half, mixed = tmp_path / "half", tmp_path / "mixed"
    shutil.copytree(tmp_path / "new" / "heads-0-of-2", half / "heads-0-of-2")
    shutil.copytree(half, mixed)
    shutil.copytree(tmp_path / "old" / "heads-1-of-2", mixed / "heads-1-of-2")
    for directory, says in (
        (half, "heads-1-of-2/index.json"),
        (mixed, "tokens of the document"),
    ):
        ended = on_ranks(2, [*asked(model, directory, "Who?"), *size])
        for end in ended:
            assert end.status > 0 and end.stdout == "" and "Traceback" not in end.stderr, end
            assert says in end.stderr


def _without_tokens(directory: Path) -> None:
    file = directory / "index.json"
    index = json.loads(file.read_text())
    file.write_text(json.dumps(index | {"tokens": index["tokens"][1:]}))


def _cut(directory: Path) -> None:
    file = next(directory.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])


def _without_facts(directory: Path) -> None:
    """As `TreeCache.save` writes it."""
    file = directory / "index.json"
    index = json.loads(file.read_text())
    del index["facts"]
    file.write_text(json.dumps(index | {"sha256": digest_of(index)}))


def _of_another_program(directory: Path) -> None:
    (directory / "index.json").write_text('{"format": "notes"}')


@pytest.mark.parametrize(
    "damage, message",
    [
        (_without_tokens, "index.json cannot be used: it is damaged"),
        (_cut, "is damaged: it has"),
        (_without_facts, "it is a cache that prepare did not write"),
        (_of_another_program, "index.json cannot be used: its format is not"),
    ],
)
def test_a_damaged_document_is_refused(
    damage: Any,
    message: str,
    checkpoint: Path,
    document: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(document, damaged)
    damage(damaged)
    assert main(asked(checkpoint, damaged, "Who?")) == 2
    output = capsys.readouterr()
    assert output.out == "" and message in output.err
    assert output.err.startswith(f"ask: the document in {damaged} does not load: ")


def test_other_weights_are_refused(
    checkpoint: Path, document: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    shutil.copytree(checkpoint, other)
    file = other / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[8 + int.from_bytes(content[:8], "little") + 100] ^= 1
    file.write_bytes(content)
    assert main(asked(other, document, "Who?")) == 2
    assert (
        "it was read with other weights: the digest of the weights was" in capsys.readouterr().err
    )
    assert main([*asked(checkpoint, document, "Who?"), "--dtype", "bfloat16"]) == 2
    assert "the dtype was 'float32', and is 'bfloat16' of" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((), "ask: there is no question: write one after DIR, or give --questions FILE\n"),
        (("Who?", " "), "ask: question 2 of 2 is blank: leave it out\n"),
        (("Who?", "--max-new-tokens", "0"), "ask: --max-new-tokens must be at least 1, got 0\n"),
        (("Who?", "--format", "Q"), "ask: --format must have {question} in it, got 'Q'\n"),
        (("--questions", "none.txt"), "ask: --questions none.txt: No such file or directory\n"),
        (("--questions", "/dev/null"), "ask: there is no question: write one after DIR, or give"),
        (("Who?", "--max-new-tokens", "9000"), "but the model has 8192 positions: shorten the"),
        (("Who?", "--tensor-parallel-size", "2"), "must be 1, with which"),
    ],
)
def test_questions_that_are_refused(
    arguments: tuple[str, ...],
    message: str,
    checkpoint: Path,
    document: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["ask", str(document), *arguments, "--model", str(checkpoint)]) == 2
    output = capsys.readouterr()
    assert output.out == "" and message in output.err


def test_a_directory_without_a_document_is_refused(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(asked(checkpoint, tmp_path, "Who?")) == 2
    assert f"ask: no document was prepared in {tmp_path}, or it" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "No such file or directory"),
        (b"", "the document is empty: name a file with a text"),
        (b" \n", "the document is empty: name a file with a text"),
        (b"\xff\xfe", "must be UTF-8"),
        (b"a" * 8192, "the document has 8192 tokens, and the model has 8192 positions"),
    ],
)
def test_documents_that_are_refused(
    content: bytes | None,
    message: str,
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file, out = tmp_path / "text.txt", tmp_path / "out"
    if content is not None:
        file.write_bytes(content)
    assert main(["prepare", str(file), "--model", str(checkpoint), "--out", str(out)]) == 2
    output = capsys.readouterr()
    assert output.err.startswith(f"prepare: FILE {file}") and message in output.err
    assert output.out == "" and not out.exists()


def test_places_that_are_refused(
    checkpoint: Path, document: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    before = sorted(document.iterdir())
    other = "--tensor-parallel-size", "2"
    for out, options, message in (
        (file, (), "this is a file; name a directory"),
        (tmp_path / "no/out", (), f"there is no directory {tmp_path / 'no'}; create it first"),
        (checkpoint, (), "this is the directory of --model; name another one"),
        (document, other, "a document is there of --tensor-parallel-size 1, got 2; remove it, or"),
        (Path("/proc/none"), (), "it cannot be written to (No such file or directory); name anoth"),
        (Path("/proc/self"), (), "it cannot be written to (No such file or directory); name anoth"),
    ):
        arguments = "--model", str(checkpoint), "--out", str(out), *options
        assert main(["prepare", str(file), *arguments]) == 2
        assert capsys.readouterr().err.startswith(f"prepare: --out {out}: {message}")
    assert sorted(document.iterdir()) == before


def test_a_document_that_fails_to_be_saved_leaves_the_one_before(
    checkpoint: Path,
    document: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a disk that is full."""
    from tree_attention.hf.cache.snapshot import files

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    out, file = tmp_path / "out", tmp_path / "text.txt"
    shutil.copytree(document, out)
    file.write_text(TEXT * 2)
    arguments = ["prepare", str(file), "--model", str(checkpoint), "--out"]
    monkeypatch.setattr(files, "write_index", full)
    for place in (out, tmp_path / "new"):
        assert main([*arguments, str(place)]) == 2
        assert f"prepare: --out {place}: " in capsys.readouterr().err
    assert not list((tmp_path / "new").glob("*"))
    names = [{x.name: x.read_bytes() for x in place.iterdir()} for place in (out, document)]
    assert names[0] == names[1]


def test_a_document_that_is_replaced_while_it_is_read_is_refused(
    checkpoint: Path,
    document: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its tokens would be those of one document, and its keys of another one."""
    from tree_attention.hf import TreeCache

    out, other, file = tmp_path / "out", tmp_path / "other", tmp_path / "text.txt"
    shutil.copytree(document, out)
    file.write_text(TEXT * 2)
    model = "--model", str(checkpoint)
    assert main(["prepare", str(file), *model, "--out", str(other)]) == 0
    load = TreeCache.load

    def replaced(*arguments: Any, **options: Any) -> TreeCache:
        shutil.copytree(other, out, dirs_exist_ok=True)
        return load(*arguments, **options)

    monkeypatch.setattr(TreeCache, "load", replaced)
    capsys.readouterr()
    assert main(asked(checkpoint, out, "Who?")) == 2
    output = capsys.readouterr()
    assert output.out == "" and "another prepare has just replaced it: ask again" in output.err


_KILLED = """
import os, signal, sys
from tree_attention.__main__ import main

sync, left = os.fsync, [3]  # of the tensors, of their name and of the index

def sync_or_die(handle):
    left[0] -= 1
    if left[0] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    sync(handle)

os.fsync = sync_or_die
main(sys.argv[1:])
"""


@pytest.mark.deep
def test_a_prepare_that_was_killed_leaves_no_document(
    checkpoint: Path, document: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If there was a document, it stays. The next prepare removes unfinished files."""
    file, new, old = tmp_path / "text.txt", tmp_path / "new", tmp_path / "old"
    file.write_text(TEXT + "More.")
    shutil.copytree(document, old)
    wanted = alone(checkpoint, "Who?", tmp_path / "one.json")
    for out in (new, old):
        arguments = ["prepare", str(file), "--model", str(checkpoint), "--out", str(out)]
        with started(arguments, 1, program=_KILLED) as ranks:
            assert ranks.wait_for_end(0).status == -signal.SIGKILL
        names = {x.name for x in out.iterdir()} - {x.name for x in document.iterdir()}
        assert sorted(Path(name).suffix for name in names) == [".safetensors", ".tmp"]
    capsys.readouterr()
    assert main(asked(checkpoint, new, "Who?")) == 2
    assert f"ask: no document was prepared in {new}, or it never ended" in capsys.readouterr().err
    answers = tmp_path / "answers.json"
    assert main(asked(checkpoint, old, "Who?", "--json", str(answers))) == 0
    assert json.loads(answers.read_text())["questions"][0]["tokens"] == wanted
    assert main(arguments) == 0
    assert sorted(x.suffix for x in old.iterdir()) == [".json", ".safetensors"]
    assert main(asked(checkpoint, old, "Who?", "--json", str(answers))) == 0
    assert json.loads(answers.read_text())["document_tokens"] == len(TEXT + "More.")
