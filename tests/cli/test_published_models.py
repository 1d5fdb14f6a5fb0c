# SPDX-License-Identifier: BSD-3-Clause
"""`generate` with checkpoints as DeepSeek-V3.2 and MiniMax-M3 are published, without options.

The mistakes these tests are for: a format that several ranks read and one does not, weights of
further tokens or of images that are taken for damage, a text of a model of text and images.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from ranks_of_commands import started
from tree_attention.__main__ import main

pytest.importorskip("transformers")

from hf_families import CHOOSING
from published import publish_deepseek_v32, publish_minimax_m3

PROMPT = "Keys and values never move. Each rank keeps its share of them."
PUBLISH = {"DeepSeek-V3.2": publish_deepseek_v32, "MiniMax-M3": publish_minimax_m3}


@pytest.mark.deep
@pytest.mark.parametrize("name", ["MiniMax-M3", "DeepSeek-V3.2"])
def test_one_process_and_two_say_the_same(name: str, checkpoint: Path, tmp_path: Path) -> None:
    """Of a prompt that is longer than what the index chooses."""
    if not CHOOSING[name].exists:
        pytest.skip(f"this release of transformers has no {name}")
    model, file = tmp_path / "model", tmp_path / "one.json"
    shutil.copytree(checkpoint, model)
    PUBLISH[name](model, vocab_size=259, max_position_embeddings=1024, eos_token_id=None)
    arguments = ["generate", "--model", str(model), "--prompt", PROMPT, "--max-new-tokens", "8"]
    assert main([*arguments, "--json", str(file)]) == 0
    assert len(json.loads(file.read_text())["tokens"]) == 8
    for options in ((), ("--tensor-parallel-size", "2")):
        with started([*arguments, "--same-tokens-as", str(file), *options], 2) as ranks:
            ended = [ranks.wait_for_end(rank) for rank in range(2)]
        assert [end.status for end in ended] == [0, 0], ended
