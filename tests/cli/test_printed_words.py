# SPDX-License-Identifier: BSD-3-Clause
"""What a user typed is printed as it was typed, on one line, and a line to copy is right in a
shell: no markup of the terminal library, no emoji codes, no folding."""

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

import tree_attention
from tree_attention.__main__ import main
from tree_attention.cli import calibration, generation, verification
from tree_attention.cli.usage import plain_console, printable, shell_word
from tree_attention.cli.world import World
from tree_attention.exchange.auto.choose import CostTable, Measured, MeasuredHost

# Parts of paths: markup, a closing tag, spaces, quotes, an emoji code, a very long one, what a
# shell expands.
WORDS = [
    "runs [exp]",
    "costs[a]",
    "a[",
    "[red]x[",
    'it\'s "so"',
    "a:heart:b",
    "x" * 230,
    "a  b",
    "$HOME `id` *",
    "-n",
    "ä",
]
WORDS_OF_SEVERAL_LINES = [
    "two\nlines",
    "tab\tor\x1b[31m",
    "back\\slash\n'quote'",
    os.fsdecode(b"\xff"),
]


def calibrated(out: Path) -> list[str]:
    """The lines that `calibrate` prints, piped, about the table that it has written."""
    console = plain_console(file=io.StringIO(), width=120)
    table = CostTable("gloo", (0, 1), (Measured("all_gather", 1024, 0.25),))
    hosts = (MeasuredHost("a", 1e9, 1e9, 1e9, 1e9, 1e-4),)
    with (
        mock.patch.object(calibration, "calibrate", lambda *_: table),
        mock.patch.object(calibration, "measure_all", lambda *_: (hosts, None)),
    ):
        calibration.run(World(), torch.device("cpu"), 0.0, out, console)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("word", [*WORDS, *WORDS_OF_SEVERAL_LINES], ids=ascii)
def test_the_line_of_calibrate_names_the_table(word: str, tmp_path: Path) -> None:
    folder = tmp_path / word / "a[" if len(word) < 200 else tmp_path / word
    folder.mkdir(parents=True)
    out = folder / "b].json"  # with the folder a closing tag
    with mock.patch.object(calibration.importlib.util, "find_spec", lambda name: None):
        *_, wrote, export, _ = calibrated(out)
    assert wrote == f"wrote {printable(out)}; to use it:"
    shell = f'{export}\nprintf %s "$TREE_ATTENTION_COSTS"'
    copied = subprocess.run(["bash", "-c", shell], capture_output=True, check=True).stdout
    assert copied == os.fsencode(out.resolve())


@pytest.mark.deep
def test_the_picture_of_calibrate(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "a[" / "b].json"
    out.parent.mkdir()
    assert calibrated(out)[-1] == f"drew {tmp_path}/a[/b].png"


@pytest.mark.parametrize("word", WORDS, ids=ascii)
def test_printable_words_stay(word: str) -> None:
    assert printable(word) == word
    console = plain_console(file=io.StringIO(), width=40)
    console.print(word)
    assert console.file.getvalue() == word + "\n"


@pytest.mark.parametrize("word", WORDS_OF_SEVERAL_LINES, ids=ascii)
def test_other_words_are_escaped(word: str) -> None:
    assert printable(word).isprintable()
    assert shell_word(Path(word)).isprintable() and shell_word(Path(word)).startswith("$'")


@pytest.mark.parametrize("word", [*WORDS, "two\nlines"], ids=ascii)
def test_errors_name_paths_as_they_were_typed(
    word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / word / "no" / "x.json"
    (tmp_path / "config.json").touch()
    for command in (
        ["calibrate", f"--out={path}"],
        ["generate", f"--model={tmp_path / word}", "--prompt", "x"],
        ["generate", f"--model={tmp_path}", f"--prompt-file={path}"],
        ["plan", f"--model={tmp_path / word}", "--context=1k", "--ranks=1", "--machine=cpu"],
        ["plan", "--model=llama-3.1-8b", f"--context={word}", "--ranks=1", "--machine=cpu"],
    ):
        assert main(command) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        shown = printable(word) if f"--context={word}" not in command else repr(word)
        assert shown in error


def test_a_plan_names_its_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    for word in ("runs [exp]", "a:heart:b", "a  b", "$HOME `id` *", "ä"):
        transformers.LlamaConfig(num_hidden_layers=1).save_pretrained(tmp_path / word)
        options = "--context=1k", "--ranks=1", "--machine=cpu"
        assert main(["plan", f"--model={tmp_path / word}", *options]) == 0
        assert any(word in line for line in capsys.readouterr().out.splitlines())


@pytest.mark.deep
def test_words_that_the_terminal_has_no_characters_for(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.LlamaConfig().save_pretrained(tmp_path / "ä")
    options = f"--model={tmp_path / 'ä'}", "--context=1k", "--ranks=1", "--machine=cpu"
    package = str(Path(tree_attention.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-m", "tree_attention", "plan", *options],
        env=os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONPATH": package},
        capture_output=True,
        check=True,
    )
    assert done.stdout.startswith(rb"\xe4, cache in")


def test_a_plan_names_its_calibration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for word in WORDS:
        file = tmp_path / f"{word[:200]}.json"
        exchanges = [Measured("all_gather", n, 1e-3 + n * 1e-9) for n in (1024, 1 << 20)]
        CostTable("gloo", (0, 1), tuple(exchanges)).save(file, {})
        options = "--model=llama-3.1-8b", "--context=1k", "--ranks=2", "--machine=cpu"
        assert main(["plan", *options, f"--calibration={file}"]) == 0
        assert any(file.name in line for line in capsys.readouterr().out.splitlines())


def test_verify_names_its_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    checks = [verification.Check(f"HuggingFace tokens: {word}", True, word) for word in WORDS]
    verification.show(checks, World())
    lines = capsys.readouterr().out.splitlines()
    assert all(any(line.count(word) >= 2 for line in lines) for word in WORDS)


def test_generate_shows_its_prompt(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = "a [/b] :heart: [red]it's[/] " + "words " * 20
    model, file = tmp_path / "a[" / "b] :on:", tmp_path / "c[" / "d].json"
    shutil.copytree(checkpoint, model)
    file.parent.mkdir()
    command = ["generate", f"--model={model}", f"--prompt={prompt}", "--max-new-tokens=2"]
    assert main([*command, f"--json={file}"]) == 0
    assert generation.excerpt(prompt) in capsys.readouterr().err.splitlines()[0]
    assert main([*command, f"--same-tokens-as={file}"]) == 0
    assert capsys.readouterr().err.splitlines()[-1] == f"The same 2 tokens as in {file}."
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | {"tokens": [1, 2]}))
    assert main([*command, f"--same-tokens-as={file}"]) == 1
    *_, last = capsys.readouterr().err.splitlines()
    assert last.startswith(f"Other tokens than in {file}: [") and last.endswith("there [1, 2]")
