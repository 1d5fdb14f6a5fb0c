# SPDX-License-Identifier: BSD-3-Clause
"""`generate`: the text of chats and samples, on ranks that it starts itself; what is wrong shows
before anything large is imported."""

import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tree_attention
from distributed import AMPLE_SECONDS
from tiers import tiers
from tree_attention.__main__ import main
from tree_attention.cli import generate, prepare

pytest.importorskip("transformers")

TEMPLATE = "{% for message in messages %}[{{ message.content }}]{% endfor %}{{ bos_token }}"


def generated(
    capsys: pytest.CaptureFixture[str], checkpoint: Path, *arguments: str
) -> tuple[str, str]:
    model = "--model", str(checkpoint), "--max-new-tokens", "8"
    assert main(["generate", *model, *arguments]) == 0
    return capsys.readouterr()


def test_the_same_seed_gives_the_same_text(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = "--prompt", "Keys and values never move."
    sampled = *prompt, "--temperature", "1.5", "--top-p", "0.99"
    greedy, _ = generated(capsys, checkpoint, *prompt)
    assert generated(capsys, checkpoint, *prompt, "--temperature", "0")[0] == greedy
    first, said = generated(capsys, checkpoint, *sampled, "--seed", "7")
    assert "Samples of --seed 7\n" in said and first != greedy
    assert generated(capsys, checkpoint, *sampled, "--seed", "7")[0] == first
    # Without a seed each run has its own, which repeats it.
    other, said = generated(capsys, checkpoint, *sampled)
    seed = said.partition("--seed ")[2].partition("\n")[0]
    assert generated(capsys, checkpoint, *sampled, "--seed", seed)[0] == other != first


@pytest.mark.deep
def test_the_likeliest_alone_are_sampled(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the tokens whose probabilities add up to almost nothing there is one."""
    prompt = "--prompt", "Keys and values never move."
    one, _ = generated(capsys, checkpoint, *prompt, "--top-p", "1e-9", "--seed", "3")
    assert one == generated(capsys, checkpoint, *prompt)[0]


@pytest.fixture
def chat(checkpoint: Path, tmp_path: Path) -> Path:
    directory = tmp_path / "chat"
    shutil.copytree(checkpoint, directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


def test_a_prompt_in_the_template(chat: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, said = generated(capsys, chat, "--prompt", "Who?", "--chat")
    # The mark at its end is of the template: the tokenizer adds none.
    assert said.startswith("Prompt (7 tokens): [Who?]<s>\n")
    assert text == generated(capsys, chat, "--prompt", "[Who?]<s>")[0]


def test_a_template_that_cannot_be_used(chat: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (chat / "chat_template.jinja").write_text("{{ raise_exception('no users here') }}")
    assert main(["generate", "--model", str(chat), "--prompt", "Who?", "--chat"]) == 2
    said = f"generate: --chat: the chat template in {chat} cannot be used: no users here\n"
    assert capsys.readouterr().err == said


def started(*arguments: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    package = str(Path(tree_attention.__file__).parents[1])
    return subprocess.run(
        [sys.executable, "-m", "tree_attention", "generate", *arguments],
        env=os.environ | {"PYTHONPATH": package},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=AMPLE_SECONDS,
    )


@pytest.mark.deep  # as a launcher and ranks import transformers; test_run.py has such ranks, too
def test_ranks_of_its_own(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two processes sample the text of one, once; then one that cannot be finds no other."""
    prompt = "--prompt", "Keys and values never move.", "--temperature", "1.5", "--seed", "5"
    one, _ = generated(capsys, checkpoint, *prompt)
    model = "--model", str(checkpoint), "--max-new-tokens", "8"
    files = "--json", "both.json"
    both = started(*model, *prompt, *files, "--ranks", "2", folder=tmp_path)
    assert (both.returncode, both.stdout) == (0, one), both.stderr
    assert "tree_attention, 2 processes" in both.stderr
    content = json.loads((tmp_path / "both.json").read_text())
    assert (content["world_size"], content["seed"]) == (2, 5)


@pytest.mark.deep
def test_an_error_of_ranks_of_its_own(checkpoint: Path, tmp_path: Path) -> None:
    """Found when the model is there, on both ranks, and said once, at the end."""
    model = "--model", str(checkpoint), "--max-new-tokens", "9999", "--prompt", "abc"
    done = started(*model, "--ranks", "2", folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    sentence = "the prompt has 3 tokens and 9999 are to follow, but the model has 8192 positions"
    assert done.stderr.splitlines()[-1].startswith(f"generate: {sentence}")
    assert done.stderr.count("generate: ") == 1


def test_a_prompt_that_is_too_long_is_told_once(
    checkpoint: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers' tokenizer foretells "indexing errors" of it, which do not come."""
    log = logging.getLogger("transformers")
    log.addHandler(caplog.handler)
    try:
        assert main(["generate", "--model", str(checkpoint), "--prompt", "a" * 9000]) == 2
    finally:
        log.removeHandler(caplog.handler)
    assert "generate: the prompt has 9000 tokens and 64 are to follow" in capsys.readouterr().err
    assert "Token indices" not in caplog.text


def test_a_text_that_is_too_long_is_told_before_the_weights_are_read(
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """These may take minutes."""
    for command in (generate, prepare):
        monkeypatch.setattr(command, "load_model", lambda *_: pytest.fail("weights were read"))
    model, file = ("--model", str(checkpoint)), tmp_path / "long.txt"
    file.write_text("a" * 9000)
    assert main(["generate", *model, "--prompt-file", str(file)]) == 2
    assert "generate: the prompt has 9000 tokens and 64 are to" in capsys.readouterr().err
    assert main(["prepare", *model, "--out", str(tmp_path / "document"), str(file)]) == 2
    assert "the document has 9000 tokens, and the model has 8192" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    tiers(
        [["--model", "/no"], ["--ranks", "2", "--shares", "1,2,3"]],
        [
            ["--prompt-file", "x"],
            ["--strategy", "ring"],
            ["--shares", "1,2"],
            ["--tensor-parallel-size", "2"],
        ],
    ),
)
@pytest.mark.parametrize(
    "launcher", tiers([{}], [{"RANK": "0", "WORLD_SIZE": "3"}]), ids=["", "torchrun"]
)
def test_arguments_are_looked_at_first(
    arguments: list[str], launcher: dict[str, str], tmp_path: Path
) -> None:
    """Before what takes seconds to import."""
    (tmp_path / "config.json").touch()
    model = [] if "--model" in arguments else ["--model", "."]
    prompt = [] if "--prompt-file" in arguments else ["--prompt", "a"]
    program = (
        "import sys; from tree_attention.__main__ import main\n"
        "status = main(['generate', *sys.argv[1:]])\n"
        "sys.exit(f'imported {seen}' if (seen := {'torch', 'transformers'} & {*sys.modules}) "
        "else status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *model, *prompt, *arguments],
        env=os.environ | {"PYTHONPATH": str(Path(tree_attention.__file__).parents[1])} | launcher,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and done.stderr.startswith("generate: "), done.stderr


def test_the_names_of_strategies_are_those_of_their_files() -> None:
    assert sorted(generate.strategy_names()) == sorted(tree_attention.strategies())
