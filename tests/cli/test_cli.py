# SPDX-License-Identifier: BSD-3-Clause
"""The commands: what they print, what they return, and a sentence for every mistake."""

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tree_attention
from distributed import run_ranks
from tree_attention import ExchangeError, lean_decode, strategies
from tree_attention.__main__ import main
from tree_attention.cli import generate, verify
from tree_attention.cli.world import World, joined_world

PROMPT = "Keys and values never move."


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random byte-level Llama with its tokenizer, in the ordinary layout of files."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    directory = tmp_path_factory.mktemp("checkpoint")
    tokens = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(directory)
    config = transformers.LlamaConfig(
        vocab_size=len(tokens),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def run_generate(checkpoint: Path, *arguments: str) -> int:
    return main(["generate", "--model", str(checkpoint), "--max-new-tokens", "9", *arguments])


def test_generate_prints_text_and_measurements(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ours.json"
    assert run_generate(checkpoint, "--prompt", PROMPT, "--json", str(file)) == 0
    output = capsys.readouterr().out
    assert PROMPT in output
    for line in ("time to first token", "inter-token latency p50, p99", "key/value cache per rank"):
        assert line in output
    content = json.loads(file.read_text())
    assert content["prompt_tokens"] == len(PROMPT) and content["new_tokens"] == 9
    assert content["world_size"] == 1 and content["bytes_sent_per_token"] == 0
    assert 0 < content["inter_token_p50_ms"] <= content["inter_token_p99_ms"]
    # keys and values of 2 layers, 2 heads of 16, float32, for at least the prompt
    assert content["kv_bytes_per_rank"] >= 2 * 2 * 2 * 16 * 4 * len(PROMPT)


def test_generate_compares_tokens_with_another_run(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ours.json"
    prompt = tmp_path / "prompt.txt"
    prompt.write_text(PROMPT, encoding="utf-8")
    assert run_generate(checkpoint, "--prompt-file", str(prompt), "--json", str(file)) == 0
    plain = ("--prompt", PROMPT, "--attention", "sdpa", "--same-tokens-as", str(file))
    assert run_generate(checkpoint, *plain) == 0
    assert "The same 9 tokens" in capsys.readouterr().out

    content = json.loads(file.read_text())
    content["tokens"][-1] += 1
    file.write_text(json.dumps(content))
    assert run_generate(checkpoint, *plain) == 1
    assert "Other tokens than in" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--prompt-file", "/nowhere.txt"], "--prompt-file /nowhere.txt: .*No such file"),
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", "x" * 600], "600 tokens and 9 are to follow, but the model has 512 positio"),
        (["--prompt", "x", "--max-new-tokens", "0"], "--max-new-tokens must be at least 1, got 0"),
        (["--prompt", "x", "--timeout", "-1"], "--timeout must be above 0 seconds, got -1"),
        (["--prompt", "x", "--json", "/no/x.json"], "--json /no/x.json: there is no directory /no"),
        (["--prompt", "x", "--same-tokens-as", "/no.json"], "/no.json is not a file that --json"),
    ],
)
def test_generate_says_what_to_put_right(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    assert run_generate(checkpoint, *arguments) == 2
    error = squeezed(capsys)
    assert error.startswith("generate: ")
    assert re.search(sentence, error)


def test_generate_without_a_checkpoint(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_generate(tmp_path, "--prompt", "x") == 2
    assert "--model takes a directory with config.json" in squeezed(capsys)
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    assert run_generate(tmp_path, "--prompt", "x") == 2
    assert f"the checkpoint in {tmp_path} does not load" in squeezed(capsys)


def squeezed(capsys: pytest.CaptureFixture[str]) -> str:
    """Everything on stderr without the line breaks of a narrow terminal."""
    return " ".join(capsys.readouterr().err.split())


def test_generate_sdpa_refuses_several_processes() -> None:
    with pytest.raises(generate.UsageError, match="--attention sdpa runs in one process"):
        generate.run(argparse.Namespace(attention="sdpa"), World(rank=0, size=2))


def test_generate_without_transformers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "tree_attention.hf", raising=False)
    monkeypatch.delitem(vars(tree_attention), "hf", raising=False)
    assert main(["generate", "--model", "/nowhere", "--prompt", "x"]) == 2
    assert "needs transformers >= 5.5: pip install 'tree-attention[hf]'" in squeezed(capsys)


def test_generate_after_a_lost_rank(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tree_attention.cli import generation

    def lost(*args: object, **kwargs: object) -> None:
        raise ExchangeError("rank 0 of 2: no answer within 30 s")

    monkeypatch.setattr(generation, "generate", lost)
    assert run_generate(checkpoint, "--prompt", "x") == 1
    error = squeezed(capsys)
    assert "no answer within 30 s" in error and "start all ranks again" in error


def test_a_long_prompt_is_shown_by_its_beginning_and_its_end() -> None:
    shown = generate.excerpt("Begin\nhere " + "a\nb " * 500 + "end there")
    assert shown.startswith("Begin here a b") and shown.endswith("a b end there")
    assert " [...] " in shown and len(shown) < 240
    assert generate.excerpt("short\ntext") == "short text"


def test_generate_under_torchrun(checkpoint: Path, tmp_path: Path) -> None:
    """The real thing: two processes stream the tokens of one, each with its share of the cache."""
    file = tmp_path / "one.json"
    assert run_generate(checkpoint, "--prompt", PROMPT * 8, "--json", str(file)) == 0
    both = tmp_path / "both.json"
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "tree_attention", "generate", "--model", str(checkpoint), "--prompt", PROMPT * 8),
        *("--max-new-tokens", "9", "--same-tokens-as", str(file), "--json", str(both)),
    ]
    package = str(Path(tree_attention.__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": package, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "The same 9 tokens" in done.stdout
    assert done.stdout.count("time to first token") == 1  # one rank speaks
    content = json.loads(both.read_text())
    assert content["world_size"] == 2
    # per layer and token the other rank gets o and lse of 4 heads in float32
    assert content["bytes_sent_per_token"] == 2 * 4 * (16 + 1) * 4
    assert 0 < content["exchange_share"] < 1


def test_joined_world_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with joined_world() as world:
        assert world == World(0, 1) and world.root
    assert not torch.distributed.is_initialized()


def test_verify_passes(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--model", str(checkpoint)]) == 0
    output = capsys.readouterr().out
    assert "FAILED" not in output and "checks passed." in output
    assert f"HuggingFace tokens: {checkpoint.name}" in output


def test_verify_fails_with_a_wrong_operator(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgets_a_key(q, k, v, *args, **kwargs):
        return lean_decode(q, k[:, :, :-1], v[:, :, :-1], *args, **kwargs)

    monkeypatch.setattr(verify, "lean_decode", forgets_a_key)
    monkeypatch.setattr(verify, "check_huggingface", lambda *_: iter(()))
    assert main(["verify"]) == 1
    output = capsys.readouterr().out
    assert "FAILED" in output and "checks failed" in output


def test_verify_skips_without_transformers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify.importlib.util, "find_spec", lambda name: None)
    (check,) = verify.check_huggingface(None)
    assert check.passed is None
    verify.show([check], World())
    assert "'tree-attention[hf]'" in capsys.readouterr().out


def verify_on_ranks(rank: int, world_size: int, wrong_rank: int | None) -> list[verify.Check]:
    world = World(rank, world_size)
    if rank == wrong_rank:

        def forgets_a_key(q, k, v, *args, **options):
            return lean_decode(q, k[:, :, 1:], v[:, :, 1:], *args, **options)

        verify.lean_decode = forgets_a_key
    checks = [*verify.check_operator(), *verify.check_ranks(world)]
    return [verify.in_all_ranks(check, world) for check in checks]


@pytest.mark.parametrize("world_size", [2, 3])
def test_verify_ranks(world_size: int) -> None:
    for checks in run_ranks(verify_on_ranks, world_size, None):
        assert all(check.passed for check in checks)
        same = sum("same bits on all ranks" in check.detail for check in checks)
        assert same == 2 * (len(strategies()) + 2)  # two layouts; the rings are two more ways


def test_verify_reports_the_rank_that_fails() -> None:
    for checks in run_ranks(verify_on_ranks, 2, 1, fresh=True):
        assert checks[0].passed is False and checks[0].detail.startswith("rank 1: ")


def test_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve"])
    assert "invalid choice: 'serve'" in capsys.readouterr().err


def test_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([])
    assert capsys.readouterr().err.endswith("arguments are required: command\n")
