# SPDX-License-Identifier: BSD-3-Clause
"""The commands: what they print, what they return, and a sentence for every mistake."""

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

import tree_attention
from distributed import AMPLE_SECONDS
from ranks_of_commands import started
from tiers import tiers
from tree_attention.__main__ import COMMANDS, main
from tree_attention.cli import generate, generation
from tree_attention.cli.usage import check_can_be_written
from tree_attention.cli.world import World, joined_world
from tree_attention.exchange import ExchangeError

PROMPT = "Keys and values never move."


_COUNT_FAULTS = """
import resource, sys, torch
from tree_attention.cli.generate import keep_freed_memory

if sys.argv[1] == "kept":
    keep_freed_memory()
for i in range(30):
    if i == 10:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.empty(1 << 24).fill_(1.0)  # above what malloc ever keeps by itself
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
@pytest.mark.deep
def test_freed_memory_is_kept() -> None:
    def faults(how: str) -> int:
        command = [sys.executable, "-c", _COUNT_FAULTS, how]
        return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    pages = 20 * (4 << 24) // os.sysconf("SC_PAGE_SIZE")
    assert 2 * faults("kept") < pages <= faults("given back")


def run_generate(checkpoint: Path, *arguments: str) -> int:
    return main(["generate", "--model", str(checkpoint), "--max-new-tokens", "9", *arguments])


def test_generate_prints_text_and_measurements(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ours.json"
    assert run_generate(checkpoint, "--prompt", PROMPT, "--json", str(file)) == 0
    text, output = capsys.readouterr()
    assert PROMPT in output
    for line in ("time to first token", "bytes sent per token and", "MiB, allocated"):
        assert line in output
    assert "tokens/s" not in output and "p99" not in output  # of so few tokens
    content = json.loads(file.read_text())
    assert text == content["completion"] + "\n"  # alone
    assert content["prompt_tokens"] == len(PROMPT) and content["new_tokens"] == 9
    assert content["world_size"] == 1 and content["bytes_sent_per_token"] == 0
    assert 0 < content["inter_token_p50_ms"] <= content["inter_token_p99_ms"]
    # keys and values of 2 layers, 2 heads of 16, float32, for at least the prompt
    assert content["kv_bytes_per_rank"] >= 2 * 2 * 2 * 16 * 4 * len(PROMPT)


def test_rates_are_those_of_many_tokens(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_generate(checkpoint, "--prompt", PROMPT * 10, "--max-new-tokens", "16") == 0
    output = capsys.readouterr().err
    for line in ("prefill .* tokens/s", "p50, p99 .* ms", "decode .* tokens/s", "time .* 0%"):
        assert re.search(line, output), line


def test_generate_compares_tokens_with_another_run(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ours.json"
    prompt = tmp_path / "prompt.txt"
    prompt.write_text(PROMPT, encoding="utf-8")
    assert run_generate(checkpoint, "--prompt-file", str(prompt), "--json", str(file)) == 0
    plain = ("--prompt", PROMPT, "--attention", "sdpa", "--same-tokens-as", str(file))
    assert run_generate(checkpoint, *plain) == 0
    assert "The same 9 tokens" in capsys.readouterr().err

    content = json.loads(file.read_text())
    content["tokens"][-1] += 1
    file.write_text(json.dumps(content))
    assert run_generate(checkpoint, *plain) == 1
    assert "Other tokens than in" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["--prompt-file", "/nowhere.txt"],
            "--prompt-file /nowhere.txt: No such file or directory$",
        ),
        (["--prompt", ""], "--prompt: the prompt is empty"),
        (["--prompt", " \n"], "--prompt: the prompt is empty"),
        (["--prompt-file", "/dev/null"], "--prompt-file /dev/null: the prompt is empty"),
        (["--prompt-file", "/dev/stdin", "--ranks", "2"], "with --ranks it must be a regular file"),
        (
            ["--prompt", "x", "--ranks", "0"],
            "--ranks must be 1 to 1,024 ranks of this machine",
        ),
        (["--prompt", "x", "--ranks", "2", "--attention", "sdpa"], "runs in one process: leave"),
        (["--prompt", "x", "--temperature", "-1"], "--temperature must be at least 0 .*, got -1"),
        (["--prompt", "x", "--temperature", "nan"], "at least 0 and finite, got nan"),
        (["--prompt", "x", "--top-p", "0"], "--top-p must be above 0 and at most 1, got 0"),
        (
            ["--prompt", "x", "--top-p", "0.5", "--temperature", "0"],
            "likeliest token each time",
        ),
        (["--prompt", "x", "--seed", "1"], "--seed is of samples: give --temperature or --top-p"),
        (["--prompt", "x", "--top-p", "1", "--seed", "-1"], "--seed must be 0 to .*, got -1"),
        (["--prompt", "x", "--strategy", "best"], "--strategy must be one of auto, .*, got 'best'"),
        (["--prompt", "x", "--chat"], "--chat: the tokenizer in .* has no chat template, as that"),
        (["--prompt", "x" * 8190], "8190 tokens and 9 are to follow, but the model has 8192 pos"),
        (["--prompt", "x", "--max-new-tokens", "0"], "--max-new-tokens must be at least 1, got 0"),
        (["--prompt", "x", "--timeout", "-1"], "--timeout must be above 0 and at most .*, got -1"),
        (["--prompt", "x", "--timeout", "0"], "--timeout must be above 0 and at most .*, got 0"),
        (["--prompt", "x", "--timeout", "inf"], "10,000,000 seconds, got inf"),
        (["--prompt", "x", "--timeout", "nan"], "10,000,000 seconds, got nan"),
        (["--prompt", "x", "--timeout", "1e300"], "10,000,000 seconds, got 1e.300"),
        (
            ["--prompt", "x", "--json", "/proc/no/x.json"],
            "--json /proc/no/x.json: there is no directory /proc/no",
        ),
        (["--prompt", "x", "--json", "/"], "--json /: this is a directory; name a file"),
        (["--prompt", "x", "--json", "/proc/x.json"], "/proc/x.json: this file cannot be written"),
        (
            ["--prompt", "x", "--same-tokens-as", "/no.json"],
            "--same-tokens-as /no.json: No such file",
        ),
    ],
)
def test_generate_says_what_to_put_right(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    assert run_generate(checkpoint, *arguments) == 2
    error = squeezed(capsys)
    assert error.startswith("generate: ")
    assert re.search(sentence, error)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "the following arguments are required: --model; see {}"),
        (["--modle=m"], "the following arguments are required: --model; did you mean --model?\n"),
        (["--temprature", "0.7"], "unrecognized arguments: --temprature 0.7; did you mean --tem"),
        (["--unheard-of"], "unrecognized arguments: --unheard-of; see {}"),
        (["--ranks", "two"], "argument --ranks: invalid int value: 'two'; see {}"),
        (["--kv-dtype", "int4"], "argument --kv-dtype: invalid choice: 'int4' (choose from "),
    ],
)
def test_options_that_are_not_read_are_told_in_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    """And not after the usage of all options, which fills a screen."""
    given = ["--model", "m"] if arguments[:1] not in ([], ["--modle=m"]) else []
    with pytest.raises(SystemExit, match="2"):
        main(["generate", "--prompt", "x", *given, *arguments])
    error = capsys.readouterr().err
    assert error.startswith("generate: " + sentence.format("python -m tree_attention generate --h"))
    assert error.count("\n") == 1


def squeezed(capsys: pytest.CaptureFixture[str]) -> str:
    """Everything on stderr without the line breaks of a narrow terminal."""
    return " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--tensor-parallel-size", "3"), "--tensor-parallel-size must divide the number of proc"),
        (("--shares", "1,2,3"), "--shares: shares must be an integer from 0 to 1,024 for each of"),
        (
            ("--tensor-parallel-size", "2", "--shares", "3,1"),
            "--shares: shares must be equal for the 2 consecutive ranks of each tensor group, got",
        ),
        (("--strategy", "ring"), "--strategy must be one of auto, all_gather, "),
    ],
)
def test_what_goes_with_no_two_ranks_is_told_before_they_start(
    checkpoint: Path,
    options: tuple[str, ...],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(generate, "launch", lambda *_: pytest.fail("ranks were started"))
    assert run_generate(checkpoint, "--prompt", "x", "--ranks", "2", *options) == 2
    assert capsys.readouterr().err.startswith(f"generate: {sentence}")


def test_generate_sdpa_refuses_several_processes() -> None:
    with pytest.raises(generate.UsageError, match="--attention sdpa runs in one process"):
        generate.check_number(argparse.Namespace(attention="sdpa"), 2)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--weights", "replicated", "--tensor-parallel-size", "2"), "splits weights: leave"),
        (("--prefill", "split", "--tensor-parallel-size", "2"), "and --prefill split out"),
        (("--device", "cuda"), "--device cuda needs a GPU for each process of this machine, which"),
        (("--tensor-parallel-size", "2"), "must divide the number of processes 1, got 2"),
        (("--weights", "split", "--prefill", "split"), "divides the prompt among processes that"),
        (("--tensor-parallel-size", "0"), "--tensor-parallel-size must be at least 1, got 0"),
        (("--weight-dtype", "int8", "--weights", "replicated"), "--weight-dtype int8 quantises"),
        (("--weight-dtype", "int4", "--attention", "sdpa"), "leave --attention sdpa and"),
        (("--weight-dtype", "int8", "--prefill", "split"), "leave --prefill split out"),
    ],
)
def test_generate_refuses_what_cannot_be(
    checkpoint: Path,
    arguments: tuple[str, ...],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run_generate(checkpoint, "--prompt", PROMPT, *arguments) == 2
    assert sentence in capsys.readouterr().err


def test_generate_in_another_dtype(checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    wide = tmp_path / "wide.json"
    for dtype, path in (("bfloat16", file), ("float32", wide)):
        arguments = ("--prompt", PROMPT, "--dtype", dtype, "--json", str(path))
        assert run_generate(checkpoint, *arguments) == 0
    narrow, whole = (json.loads(path.read_text()) for path in (file, wide))
    assert 2 * narrow["weight_bytes_per_rank"] == whole["weight_bytes_per_rank"]


def test_generate_without_transformers(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "tree_attention.hf", raising=False)
    monkeypatch.delitem(vars(tree_attention), "hf", raising=False)
    assert main(["generate", "--model", str(checkpoint), "--prompt", "x"]) == 2
    assert "needs transformers >= 5.5: pip install 'transformers>=5.5'" in squeezed(capsys)


@pytest.mark.parametrize(
    "content", ["[1, 2]", "3", '{"tokens": 3}', '{"tokens": ["a"]}', "{", "{}"]
)
def test_files_that_another_command_wrote(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    """Found before the work: nothing was generated."""
    file = tmp_path / "other.json"
    file.write_text(content)
    assert run_generate(checkpoint, "--prompt", PROMPT, "--same-tokens-as", str(file)) == 2
    output = capsys.readouterr()
    assert output.err.startswith(f"generate: --same-tokens-as {file}: ")
    assert output.err.endswith("; name a file that --json wrote\n")
    assert output.out == "" and output.err.count("\n") == 1


def test_a_file_that_can_be_written_is_left_alone(tmp_path: Path) -> None:
    present, absent = tmp_path / "present", tmp_path / "absent"
    present.write_text("kept")
    for file in (present, absent):
        check_can_be_written("--json", file)
    assert present.read_text() == "kept" and not absent.exists()


def test_only_the_root_needs_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ranks may be on machines that do not have the directory."""
    monkeypatch.setenv("RANK", "1")
    check_can_be_written("--json", Path("/proc/no/such/directory/x.json"))


def test_a_long_prompt_is_shown_by_its_beginning_and_its_end() -> None:
    shown = generation.excerpt("Begin\nhere " + "a\nb " * 500 + "end there")
    assert shown.startswith("Begin here a b") and shown.endswith("a b end there")
    assert " [...] " in shown and len(shown) < 240
    assert generation.excerpt("short\ntext") == "short text"


# By the value of --weights: bytes a rank sends for a token's merges, and for its sums and logits.
# Of each layer the other rank gets o and lse in float32, of all heads or of those that are its own.
# Its sums are of the embedding and twice a layer, and it gets half of the logits.
TRAFFIC = {"replicated": (2 * 4 * (16 + 1) * 4, 0), "split": (2 * 2 * (16 + 1) * 4, 1280 + 512)}


def two_ranks(checkpoint: Path, folder: Path, *options: str) -> list[str]:
    """The arguments with which both write what they have done and find the tokens of one."""
    one = folder / "one.json"
    assert run_generate(checkpoint, "--prompt", PROMPT * 8, "--json", str(one)) == 0
    files = "--same-tokens-as", str(one), "--json", str(folder / "both.json")
    model = "--model", str(checkpoint), "--max-new-tokens", "9"
    return ["generate", *model, "--prompt", PROMPT * 8, *files, *options]


def check_two_ranks(folder: Path, output: str, weights: str) -> None:
    assert "The same 9 tokens" in output
    assert output.count("time to first token") == 1  # one rank speaks
    one, both = (json.loads((folder / f"{name}.json").read_text()) for name in ("one", "both"))
    assert both["world_size"] == 2
    assert (both["merge_bytes_per_token"], both["sum_bytes_per_token"]) == TRAFFIC[weights]
    share = both["weight_bytes_per_rank"] / one["weight_bytes_per_rank"]
    assert share == 1 if weights == "replicated" else 0.5 < share < 0.6
    assert 0 < both["exchange_share"] < 1


@pytest.mark.deep
def test_generate_with_quantised_weights(checkpoint: Path, tmp_path: Path) -> None:
    """Two ranks say what one says with weights of as many bits, from fewer bytes."""
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    options = "--prompt", PROMPT * 8, "--weight-dtype", "int8"
    assert run_generate(checkpoint, *options, "--json", str(one)) == 0
    model = "generate", "--model", str(checkpoint), "--max-new-tokens", "9"
    files = "--json", str(two), "--same-tokens-as", str(one)
    with started([*model, *options, *files]) as ranks:
        ended = [ranks.wait_for_end(rank) for rank in range(2)]
    assert [end.status for end in ended] == [0, 0], ended
    sizes = [json.loads(file.read_text())["weight_bytes_per_rank"] for file in (one, two)]
    assert sizes[1] < 0.6 * sizes[0]


@pytest.mark.deep
def test_generate_says_what_is_not_cut(checkpoint: Path, tmp_path: Path) -> None:
    """One line, on the first rank, as the layers with a state of this model are whole."""
    from hf_families import HYBRIDS, make_model

    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    family = HYBRIDS["Granite 4"]
    options = family.options | {"vocab_size": 259, "eos_token_id": None}
    make_model(replace(family, options=options)).save_pretrained(tmp_path)
    model = "--model", str(tmp_path), "--prompt", "ab", "--max-new-tokens", "2"
    with started(["generate", *model]) as ranks:
        ended = [ranks.wait_for_end(rank) for rank in range(2)]
    assert [end.status for end in ended] == [0, 0], ended
    first, second = (
        [x for x in end.stderr.splitlines() if not x.startswith("[transformers]")] for end in ended
    )
    says = r"from_pretrained: \d+% of this rank's .* are not cut, .*: model\.layers\.\*\.mamba"
    assert re.match(says, first[0]) and first[1] == "Prompt (2 tokens): ab" and second == []


@pytest.mark.deep
def test_generate_under_torchrun(checkpoint: Path, tmp_path: Path) -> None:
    """The real thing: two processes stream the tokens of one, each with its share."""
    launcher = "torch.distributed.run", "--standalone", "--nproc-per-node", "2"
    arguments = [*two_ranks(checkpoint, tmp_path), "--timeout", str(AMPLE_SECONDS)]
    package = str(Path(tree_attention.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-m", *launcher, "-m", "tree_attention", *arguments],
        env=os.environ | {"PYTHONPATH": package, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=AMPLE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    check_two_ranks(tmp_path, done.stderr, "split")


@pytest.mark.parametrize(
    "weights, options",
    tiers(
        [("split", ("--weights", "split"))],
        [
            ("replicated", ("--weights", "replicated")),
            ("replicated", ("--strategy", "butterfly")),  # which split weights cannot use
        ],
    ),
)
def test_generate_on_two_ranks(
    checkpoint: Path, tmp_path: Path, weights: str, options: tuple[str, ...]
) -> None:
    with started(two_ranks(checkpoint, tmp_path, *options)) as ranks:
        ended = [ranks.wait_for_end(rank) for rank in range(2)]
    assert [end.status for end in ended] == [0, 0], ended
    check_two_ranks(tmp_path, ended[0].stderr + ended[1].stderr, weights)
    completion = json.loads((tmp_path / "both.json").read_text())["completion"]
    assert (ended[0].stdout, ended[1].stdout) == (completion + "\n", "")


def test_joined_world_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with joined_world() as world:
        assert world == World(0, 1) and world.root
    assert not torch.distributed.is_initialized()


def test_a_cache_without_memory_ends_a_command_in_its_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(arguments: list[str]) -> int:
        raise torch.OutOfMemoryError("TreeCache: 9 tokens need 9 GiB")

    monkeypatch.setattr(generate, "main", fail)
    assert main(["generate"]) == 1
    assert capsys.readouterr().err == "generate: TreeCache: 9 tokens need 9 GiB\n"


def test_a_tensor_without_memory_ends_a_command_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(generate, "main", lambda arguments: torch.empty(1 << 56))
    assert main(["generate"]) == 1
    words = (
        r"generate: DefaultCPUAllocator: can't allocate memory: you tried to allocate \d+ bytes.*"
    )
    assert re.fullmatch(words + "\n", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (MemoryError(), ""),
        (
            ImportError("libtorch_cpu.so: failed to map segment from shared object"),
            r" \(libtorch_cpu.so: failed to map segment from shared object\)",
        ),
    ],
)
def test_imports_without_memory_end_a_command_in_a_sentence(
    error: Exception,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(arguments: list[str]) -> int:
        raise error

    monkeypatch.setattr(generate, "main", fail)
    assert main(["generate"]) == 1
    sentence = f"generate: this process gets no more memory: free some, .*{reason}\n"
    assert re.fullmatch(sentence, capsys.readouterr().err)


def test_other_errors_of_the_loader_are_not_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without execution."""
    error = ImportError("x.so: failed to map segment from shared object: Operation not permitted")
    monkeypatch.setattr(generate, "main", mock.Mock(side_effect=error))
    with pytest.raises(ImportError, match="not permitted"):
        main(["generate"])


def test_another_import_that_fails_shows_where(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(arguments: list[str]) -> int:
        raise ImportError("cannot import name 'x'")

    monkeypatch.setattr(generate, "main", fail)
    with pytest.raises(ImportError, match="cannot import name"):
        main(["generate"])


@pytest.mark.parametrize(
    ("raised", "status", "says"),
    [("KeyboardInterrupt", 130, ""), ("MemoryError", 1, "tree_attention: this process gets too ")],
)
def test_what_ends_python_before_a_command_begins(
    raised: str, status: int, says: str, tmp_path: Path
) -> None:
    """While it imports what all commands need."""
    (tmp_path / "rich").mkdir()
    (tmp_path / "rich/__init__.py").write_text(f"raise {raised}")
    path = f"{tmp_path}:{Path(tree_attention.__file__).parents[1]}"
    done = subprocess.run(
        [sys.executable, "-m", "tree_attention", "--version"],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == status and done.stdout == ""
    assert done.stderr.startswith(says) and done.stderr.count("\n") == bool(says)


def test_another_rank_without_memory_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "rank 0 of 2: end of generate on rank 1: DefaultCPUAllocator: can't allocate memory"

    def fail(arguments: list[str]) -> int:
        raise ExchangeError(said)

    monkeypatch.setattr(generate, "main", fail)
    assert main(["generate"]) == 1
    assert capsys.readouterr().err == f"generate: {said}\n"


@pytest.mark.parametrize(
    ("words", "way"),
    [
        (["serve"], "see python -m tree_attention --help"),
        (["genrate", "--prompt", "a"], "did you mean generate?"),
        (
            ["generate", "--model", "a", "--prompt", "a", "--dtype", "bf16"],
            "did you mean bfloat16?",
        ),
    ],
)
def test_what_is_no_choice_is_told_in_one_line(
    words: list[str], way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    output = capsys.readouterr()
    assert end.value.code == 2 and not output.out and output.err.count("\n") == 1
    assert "invalid choice: " in output.err and output.err.endswith(f"); {way}\n"), output.err


def test_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    """The list, as somebody asks who does not know them."""
    assert main([]) == 0
    output = capsys.readouterr()
    assert all(f"  {name} " in output.out for name in COMMANDS) and output.err == ""


def test_probing_a_file_leaves_what_is_there(tmp_path: Path) -> None:
    link, pipe, old = (tmp_path / name for name in ("link", "pipe", "old"))
    link.symlink_to(tmp_path / "target")
    os.mkfifo(pipe)
    old.write_text("kept")
    for path in (link, pipe, old):
        check_can_be_written("--json", path)  # opening the pipe would wait for a reader
    assert link.is_symlink() and not link.exists()
    assert old.read_text() == "kept"
