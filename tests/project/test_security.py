# SPDX-License-Identifier: BSD-3-Clause
"""docs/security.md: its store listens where the page says, and checkpoints run no code."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ranks_of_commands import started
from test_readme import ROOT, WORLD_OF_ONE, python_program

PAGE = ROOT / "docs" / "security.md"
CHECKPOINT = ROOT / "examples" / "passkey-llama"
# The local addresses of this process's TCP sockets that listen, in /proc's hexadecimal.
LISTENING = """
links = (os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd"))
own = {link.rpartition(":[")[2].rstrip("]") for link in links if "socket:[" in link}
for table in ("tcp", "tcp6"):
    for line in open(f"/proc/self/net/{table}").read().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and fields[9] in own:
            print(fields[1].split(":")[0])
"""
LOOPBACK = "0100007F"
ORDINARY = 'import os\nimport torch.distributed as dist\n\ndist.init_process_group("gloo")'


def listening(program: str, folder: Path) -> list[str]:
    """The addresses on which a rank listens after `program`: of the store, and of Gloo."""
    script = folder / "rank.py"
    script.write_text(f"{program}\n{LISTENING}")
    environment = os.environ | WORLD_OF_ONE | {"GLOO_SOCKET_IFNAME": "lo"}
    result = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, check=True
    )
    return result.stdout.split()


@pytest.mark.deep
@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells which sockets listen")
def test_the_store_listens_on_one_address(tmp_path: Path) -> None:
    addresses = listening(python_program(PAGE), tmp_path)
    assert LOOPBACK in addresses and set(addresses) == {LOOPBACK}
    anywhere = listening(ORDINARY, tmp_path)
    assert {"0" * 8, "0" * 32} & set(anywhere), f"torch listens on {anywhere}: correct the page"


GENERATE = """
import io, runpy, sys
sys.stdin = io.StringIO(9 * "y\\n")
runpy.run_module("tree_attention", run_name="__main__", alter_sys=True)
"""


def refusal(checkpoint: Path) -> str:
    """What `generate` says in place of a text, to somebody who says yes to every question."""
    arguments = ["generate", "--prompt", "a", "--max-new-tokens", "1", "--model", str(checkpoint)]
    with started(arguments, 0, program=GENERATE) as ranks:
        ended = ranks.wait_for_end(0)
    assert ended.status != 0 and "Traceback" not in ended.stderr
    return " ".join(ended.stderr.split())  # it is wrapped


@pytest.mark.deep
def test_code_beside_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    checkpoint, ran = tmp_path / "checkpoint", tmp_path / "ran"
    shutil.copytree(CHECKPOINT, checkpoint)
    config = json.loads((checkpoint / "config.json").read_text())
    classes = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    config |= {"model_type": "unknown", "auto_map": classes}
    (checkpoint / "config.json").write_text(json.dumps(config))
    (checkpoint / "code.py").write_text(f"open({str(ran)!r}, 'w')\n")
    said = refusal(checkpoint)
    assert not ran.exists(), "the code was run"
    assert "does not load" in said and "contains custom code" in said


@pytest.mark.deep
def test_weights_are_safetensors_alone(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(CHECKPOINT, checkpoint)
    weights = checkpoint / "model.safetensors"
    torch.save(load_file(weights), checkpoint / "pytorch_model.bin")
    weights.unlink()
    said = refusal(checkpoint)
    assert "does not load" in said and "no file named model.safetensors" in said
