# SPDX-License-Identifier: BSD-3-Clause
"""docs/big_models.md: its commands print what it shows, and its failures say what it says."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from safetensors.torch import load_file, save_file

from distributed import Lost, run_ranks
from test_values import NUMBER

pytest.importorskip("transformers")

from transformers import DeepseekV3Config

from tree_attention import ExchangeError, hf
from tree_attention.__main__ import main
from tree_attention.weights import load as loading
from tree_attention.weights.quantised import SCHEMES

pytestmark = pytest.mark.deep

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/big_models.md").read_text()
BIG, SMALL = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
SHOWN = re.findall(r"```\n(.*?)```\n", re.sub(r"```\w+\n.*?```\n", "", PAGE, flags=re.DOTALL), re.S)
SYMPTOMS = (ROOT / "docs/troubleshooting.md").read_text()
# What the published config.json has beside the defaults of its class, which are of this model.
PUBLISHED = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "dtype": "bfloat16",
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
}
TIMEOUT = 3.0  # of a rank that waits for a lost one


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the programs of the page, and with what the second one makes."""
    made = tmp_path_factory.mktemp("page")
    (made / "examples").symlink_to(ROOT / "examples")
    (made / "lab").symlink_to(ROOT / "lab")
    (made / "big.py").write_text(BIG)
    (made / "make_small.py").write_text(SMALL)
    first, _ = _lines_of_the_run()
    run(first, made)
    return made


def _lines_of_the_run() -> tuple[str, str]:
    (block,) = (block for block in COMMANDS if block.startswith("python make_small.py"))
    first, _, rest = block.partition("\n")
    return first, rest


def run(line: str, folder: Path) -> str:
    own = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    environment = os.environ | {"PATH": own, "PYTHONPATH": f"{ROOT / 'python'}:{ROOT}"}
    command = ["bash", "-euc", line]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    DeepseekV3Config().save_pretrained(tmp_path / "DeepSeek-V3")
    config = tmp_path / "DeepSeek-V3/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | PUBLISHED))
    monkeypatch.chdir(tmp_path)
    lines = [block for block in COMMANDS if block.startswith("python -m tree_attention plan")]
    assert len(lines) == 2
    for line, shown in zip(lines, SHOWN[:2], strict=True):
        assert main(shlex.split(line)[3:]) == 0
        found = "\n".join(text.rstrip() for text in capsys.readouterr().out.splitlines())
        assert found + "\n" == shown


def masked(text: str) -> list[str]:
    """The lines of a run, whichever rank was first, without times and words drawn by chance, and
    without what torch logs of its sockets, at the end also frames of C++."""
    text = re.sub(r"\d+\.\d s\b", "0.0 s", text)
    lines = re.sub(r"(The sky is).*", r"\1", text).splitlines()
    known = re.compile(r"\[host\d\] (rank \d holds|The grass is green|32 tokens)")
    return sorted(line.rstrip() for line in lines if known.match(line))


def test_run_on_two_emulated_hosts(folder: Path) -> None:
    hosts = [sys.executable, "-m", "lab.emulation", "--hosts", "2", "--link", "lan", "--", "true"]
    asked = subprocess.run(hosts, cwd=ROOT, capture_output=True, text=True)
    if asked.returncode == 2 and not asked.stderr.startswith("usage"):
        pytest.skip(asked.stderr.strip())
    _, line = _lines_of_the_run()
    assert "big.py small-deepseek" in line
    # The tests are root already where they come so far.
    found = run(line.replace("sudo ", "", 1), folder)
    assert masked(found) == masked(SHOWN[2]) and len(masked(found)) == SHOWN[2].count("\n")


def _held(rank: int, world_size: int, path: Path, weights: str | None) -> int:
    model = hf.from_pretrained(path, tensor_parallel_size=world_size, weights=weights)
    return sum(parameter.nbytes for parameter in model.parameters())


def test_bytes_of_the_table(folder: Path) -> None:
    path = folder / "small-deepseek"
    whole = _held(0, 1, path, None)
    table = re.findall(r"^\|.*`weights=`(?:.*\n\|)*.*", PAGE, re.MULTILINE)[0].splitlines()
    assert NUMBER.findall(table[0])[0] == f"{whole / 1e6:.1f}"
    shown = [[cell.strip(" %") for cell in row.split("|")[2:-1]] for row in table[2:]]
    found = []
    for world_size in (1, 2):
        for weights in (None, *SCHEMES):
            (held,) = {*run_ranks(_held, world_size, path, weights)}
            found.append([f"{weights}", f"{held / 1e6:.1f}", f"{100 * held / whole:.0f}"])
    assert shown == found


def _message(rank: int, world_size: int, paths: list[Path], options: dict[str, Any]) -> str:
    with pytest.raises((ValueError, ExchangeError)) as raised:
        hf.from_pretrained(paths[rank], **options)
    return str(raised.value)


def _copy(folder: Path, name: str) -> tuple[Path, dict[str, Any]]:
    path = folder / name
    shutil.copytree(folder / "small-deepseek", path)
    return path, load_file(path / "model.safetensors")


def _shown(message: str, folder: Path) -> None:
    message = re.sub(r"^rank \d of \d: ", "", message.replace(f"{folder}/", ""))
    assert f"`{message}`" in SYMPTOMS, message


def test_a_lost_expert(folder: Path) -> None:
    path, tensors = _copy(folder, "damaged")
    del tensors["model.layers.2.mlp.experts.5.up_proj.weight"]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    for message in run_ranks(_message, 2, [path, path], {}):
        _shown(message.replace("damaged", "small-deepseek"), folder)


def test_other_files_on_another_host(folder: Path) -> None:
    path, tensors = _copy(folder, "other")
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    for message in run_ranks(_message, 2, [folder / "small-deepseek", path], {}):
        _shown(re.sub(r"[0-9a-f]{12,}", "…", message), folder)


def test_sizes_and_schemes(folder: Path) -> None:
    paths = [folder / "small-deepseek"] * 3
    for world_size, options in (
        (3, {"tensor_parallel_size": 2}),
        (2, {"weights": "int2"}),
        (2, {"weights": "int8", "device": "cuda"}),
    ):
        for message in run_ranks(_message, world_size, paths, options):
            _shown(message, folder)


def _lose(rank: int, world_size: int, path: Path) -> str:
    hf.from_pretrained(path)  # what is imported and set up once is, now
    load, remaining = loading.set_tensor, iter(range(20))

    def lost_in_loading(*args: Any) -> None:
        load(*args)
        if rank == 1 and next(remaining, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)

    with mock.patch.object(loading, "set_tensor", lost_in_loading):
        return _message(rank, world_size, [path, path], {"weights": "int8", "timeout": TIMEOUT})


def test_a_rank_that_is_lost_while_it_loads(folder: Path) -> None:
    message, lost = run_ranks(_lose, 2, folder / "small-deepseek", lost=[1])
    assert isinstance(lost, Lost)
    _shown(message.replace(f"within {TIMEOUT:g} s", "within 900 s"), folder)


def test_launchers_are_those_of_the_page_of_several_hosts() -> None:
    launcher, *_ = re.findall(
        r"torchrun .*?(?= -m tree_attention verify)", (ROOT / "docs/multi_node.md").read_text()
    )
    lines = re.findall(r"torchrun .*", PAGE)
    assert len(lines) == 3 and all(line.startswith(launcher) for line in lines)
