# SPDX-License-Identifier: BSD-3-Clause
"""`generate --far cpu`: older keys in the host's memory, on a fake device."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from fake_device import fake_cuda
from tree_attention.__main__ import main

pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is imitated")

FAR = "--far", "cpu", "--near-tokens"


@pytest.mark.deep
def test_the_tokens_are_those_without_far_keys(checkpoint: Path, tmp_path: Path) -> None:
    from tree_attention import hf
    from tree_attention.hf.cache.far import FarLayer

    question, tokens = tmp_path / "question.txt", str(tmp_path / "tokens.json")
    question.write_text("Keys and values never move. " * 4)
    arguments = ["generate", "--model", str(checkpoint), "--prompt-file", str(question)]
    arguments += ["--max-new-tokens", "60"]
    assert main([*arguments, "--json", tokens]) == 0
    made = list[hf.TreeCache]()

    def small_pages(*args: Any, **options: Any) -> hf.TreeCache:
        made.append(TreeCache(*args, **options, growth=8))
        return made[-1]

    TreeCache = hf.TreeCache
    # The fake device cannot slice inference tensors.
    plain = mock.patch.object(torch, "inference_mode", lambda mode=True: nullcontext())
    of_gpu = mock.patch(
        "tree_attention.cli.world.choose_device", lambda name: torch.device("cuda", 0)
    )
    with fake_cuda(), of_gpu, plain, mock.patch.object(hf, "TreeCache", small_pages):
        assert main([*arguments, *FAR, "16", "--same-tokens-as", tokens]) == 0
    for layer in made[-1].layers:
        assert isinstance(layer, FarLayer) and layer.near_tokens == 16 and layer.dropped > 100


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--far", "cpu"], "--far cpu needs --near-tokens, the number of newest tokens whose key"),
        (["--near-tokens", "8k"], "--near-tokens is for --far cpu: give both, or neither"),
        (
            ["--far", "cpu", "--near-tokens=-3"],
            "--near-tokens must be a whole number of tokens up to 67,108,864, such as",
        ),
        ([*FAR, "1.5"], "--near-tokens must be a whole number of tokens up to 67,108,864, such a"),
        ([*FAR, "8k", "--attention", "sdpa"], "--far cpu is not supported with --attention sdpa"),
        ([*FAR, "8k", "--prefill", "split"], "--far cpu is not supported with --prefill split: l"),
        ([*FAR, "8k", "--device", "cpu"], "--far cpu is not supported with --device cpu: leave o"),
        ([*FAR, "8k"], "--far cpu keeps older keys of a model on a GPU in the host's memory, and "),
    ],
)
def test_mistakes(
    arguments: list[str], sentence: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = "--model", str(checkpoint), "--prompt", "Who?"
    assert main(["generate", *model, *arguments]) == 2
    output = capsys.readouterr()
    assert output.err.startswith(f"generate: {sentence}") and output.out == ""
