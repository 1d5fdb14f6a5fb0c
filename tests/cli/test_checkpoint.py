# SPDX-License-Identifier: BSD-3-Clause
"""Checkpoints that are damaged or incomplete: a sentence from `generate` and from `verify`."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
import transformers
from safetensors.torch import load_file, save_file

from tree_attention.__main__ import main
from tree_attention.cli.checkpoint import damages_named, load

WEIGHT = "model.layers.{}.mlp.down_proj.weight"


def truncate(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])


def cut_the_header(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5])


def break_the_tokenizer(directory: Path) -> None:
    (directory / "tokenizer.json").write_text("[1, 2]")


def cut_the_tokenizer(directory: Path) -> None:
    (directory / "tokenizer.json").write_text('{"model": ')


def break_the_config(directory: Path) -> None:
    (directory / "config.json").write_text("[1, 2]")


def contradict_the_config(directory: Path) -> None:
    change_config(directory, intermediate_size=64)


def change_config(directory: Path, **fields: Any) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def lower_the_layers(directory: Path) -> None:
    change_config(directory, num_hidden_layers=1)


def raise_the_layers(directory: Path) -> None:
    change_config(directory, num_hidden_layers=10**6)


def lower_the_heads(directory: Path) -> None:
    change_config(directory, num_attention_heads=0)


def break_the_defaults(directory: Path) -> None:
    (directory / "generation_config.json").write_text("{")


def name_the_last_token(directory: Path) -> None:
    (directory / "generation_config.json").write_text('{"eos_token_id": "</s>"}')


def remove_the_weights(directory: Path) -> None:
    (directory / "model.safetensors").unlink()


def remove_everything(directory: Path) -> None:
    shutil.rmtree(directory)


def lose_weights(directory: Path, layers: int = 2) -> None:
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for layer in range(layers):
        del tensors[WEIGHT.format(layer)]
    save_file(tensors, file, metadata={"format": "pt"})


def lose_many_weights(directory: Path) -> None:
    file = directory / "model.safetensors"
    tensors = {name: x for name, x in load_file(file).items() if "proj" not in name}
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (truncate, "does not load: Error while deserializing header: incomplete metadata"),
        (cut_the_header, "does not load: Error while deserializing header"),
        (break_the_tokenizer, "does not load: "),
        (cut_the_tokenizer, "does not load: "),
        (break_the_config, "does not load: "),
        (contradict_the_config, "does not load: "),
        (lower_the_layers, "the model of its config.json lacks: model.layers.1.input_layernorm"),
        (raise_the_layers, "num_hidden_layers must be an integer of 1 to 1,000, got 1000000"),
        (lower_the_heads, "num_attention_heads must be an integer of 1 to 10,000, got 0"),
        (break_the_defaults, "/generation_config.json: it is no JSON: "),
        (name_the_last_token, "eos_token_id of its defaults of generation must be the number of"),
        (remove_the_weights, "does not load: "),
        (remove_everything, "--model takes a directory with config.json, *.safetensors and a tok"),
        (remove_everything, "`hf download NAME --local-dir DIR` makes one from the model"),
        (lose_weights, f"random numbers: {WEIGHT.format(0)}, {WEIGHT.format(1)}; copy or download"),
        (lose_many_weights, "model.layers.0.mlp.up_proj.weight and 11 more; copy or download"),
    ],
)
def test_damaged_checkpoints(
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Path], None],
    sentence: str,
) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(checkpoint, damaged)
    damage(damaged)
    assert main(["generate", "--prompt", "x", "--model", str(damaged)]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("generate: ") and str(damaged) in error
    assert sentence in error, error


def test_a_slip_in_the_path_of_a_model_is_told(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slip = f"{checkpoint}_"
    assert main(["generate", "--prompt", "x", "--model", slip]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"generate: no checkpoint in {slip}: --model takes a directory with")
    assert error.endswith(f"; did you mean {checkpoint}?\n")


@pytest.mark.deep
def test_verify_with_a_checkpoint_that_lacks_weights(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    lose_weights(tmp_path)
    assert main(["verify", "--model", str(tmp_path)]) == 2
    assert f"verify: the checkpoint in {tmp_path} lacks weights" in capsys.readouterr().err


def test_tied_weights_are_not_missing(checkpoint: Path, tmp_path: Path) -> None:
    """A checkpoint holds them once."""
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    config = transformers.LlamaConfig.from_pretrained(checkpoint, tie_word_embeddings=True)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    model = load(tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_model_that_cannot_be_enabled(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    config = transformers.Gemma3nTextConfig(
        vocab_size=300,
        vocab_size_per_layer_input=300,
        hidden_size=16,
        hidden_size_per_layer_input=8,
        intermediate_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_kv_shared_layers=2,
        laurel_rank=4,
    )
    transformers.Gemma3nForCausalLM(config).save_pretrained(tmp_path)
    assert main(["generate", "--prompt", "x", "--model", str(tmp_path)]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"generate: --model {tmp_path}: TreeCache: every layer must have keys")
    assert error.endswith("; --attention sdpa generates in one process")


def test_a_model_that_cannot_be_quantised(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sentence begins with the option that was given."""
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    config = transformers.BloomConfig(vocab_size=300, hidden_size=16, n_layer=1, n_head=2)
    transformers.BloomForCausalLM(config).save_pretrained(tmp_path)
    for options in (("--weight-dtype", "int8"), ("--weights", "split", "--weight-dtype", "int8")):
        assert main(["generate", "--prompt", "x", "--model", str(tmp_path), *options]) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        begin = f"generate: {' '.join(options[:2])}: from_pretrained: BloomForCausalLM cannot be"
        assert error.startswith(begin), error


def test_memory_is_no_damage_of_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(torch.OutOfMemoryError, match=r"^1 GiB is free$"), damages_named(tmp_path):
        raise torch.OutOfMemoryError("1 GiB is free")
