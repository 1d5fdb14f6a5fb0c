# SPDX-License-Identifier: BSD-3-Clause
"""`generate` and `verify` are greedy, whatever the checkpoint's generation_config.json says."""

import json
import shutil
from pathlib import Path

import pytest

from ranks_of_commands import started
from tree_attention.__main__ import main

pytest.importorskip("transformers")

# Each would have other tokens, several sequences, or no result.
DEFAULTS = {
    "num_beams": 3,
    "num_return_sequences": 2,
    "cache_implementation": "static",
    "do_sample": True,
    "temperature": 5.0,
    "suppress_tokens": [*range(3, 250)],
    "stop_strings": ["a"],
}
NOTE = "generate: of generation_config.json, {} count for nothing\n"


def with_defaults(checkpoint: Path, folder: Path, **defaults: object) -> Path:
    shutil.copytree(checkpoint, folder, dirs_exist_ok=True)
    (folder / "generation_config.json").write_text(json.dumps(defaults))
    return folder


def run(model: Path, *arguments: str) -> list[str]:
    return ["generate", "--model", str(model), "--prompt", "abc", *arguments]


@pytest.mark.deep
def test_other_defaults_count_for_nothing(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, other = tmp_path / "plain.json", tmp_path / "other.json"
    assert main(run(checkpoint, "--max-new-tokens", "5", "--json", str(plain))) == 0
    assert "generation_config" not in capsys.readouterr().err
    files = "--max-new-tokens", "5", "--same-tokens-as", str(plain), "--json", str(other)
    changed = with_defaults(checkpoint, tmp_path / "changed", **DEFAULTS)
    for attention in ("tree_attention", "sdpa"):
        assert main(run(changed, *files, "--attention", attention)) == 0
        assert NOTE.format(", ".join(sorted(DEFAULTS))) in capsys.readouterr().err
    assert main(["verify", "--model", str(changed)]) == 0
    with started(run(changed, *files, "--weights", "split")) as ranks:
        ended = [ranks.wait_for_end(rank) for rank in range(2)]
    assert [end.status for end in ended] == [0, 0], ended
    assert NOTE.format(", ".join(sorted(DEFAULTS))) in ended[0].stderr and ended[1].stderr == ""


def test_the_last_token_ends_the_text(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tokens.json"
    assert main(run(checkpoint, "--max-new-tokens", "9", "--json", str(file))) == 0
    tokens = json.loads(file.read_text())["tokens"]
    last = tokens[4]
    ends = with_defaults(checkpoint, tmp_path / "ends", eos_token_id=[299, last], num_beams=1)
    assert main(run(ends, "--max-new-tokens", "9", "--json", str(file))) == 0
    assert json.loads(file.read_text())["tokens"] == tokens[: tokens.index(last) + 1]
    assert "generation_config" not in capsys.readouterr().err


@pytest.mark.deep
@pytest.mark.parametrize("defaults", [{"eos_token_id": "</s>"}, {"eos_token_id": []}])
def test_last_tokens_that_are_no_numbers(
    checkpoint: Path, tmp_path: Path, defaults: dict[str, object]
) -> None:
    changed = with_defaults(checkpoint, tmp_path, **defaults)
    with started(run(changed, "--weights", "split")) as ranks:
        ended = [ranks.wait_for_end(rank) for rank in range(2)]
    for end in ended:
        assert end.status == 2 and "eos_token_id of its defaults of generation mu" in end.stderr, (
            end
        )
