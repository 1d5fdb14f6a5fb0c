# SPDX-License-Identifier: BSD-3-Clause
"""Eight questions behind one document of 64k tokens, together and each alone, in transformers.

python benchmarks/documents.py --out benchmarks/results

The document is random keys and values put straight into the cache, as in llama.py. Two ranks save
it; `tree_attention ask` reads it and answers the questions in one process.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, Qwen3Config

# Started by its path: `benchmarks` is found from the root of the checkout.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

from benchmarks.harness import llama_model
from benchmarks.harness.measure import Load, load_warnings, pin_threads, time_in_step
from benchmarks.harness.program import finish, parser_of, progress_bar, shown
from benchmarks.harness.ranks import Ranks, run_rank, start_ranks
from benchmarks.harness.report import ROOT, Columns, Report, columns_of, environment, verdict
from tree_attention.cli.document import facts_of
from tree_attention.hf import CACHE_NAME, TreeCache
from tree_attention.hf.cache.snapshot.files import save

ALONE, TOGETHER = "alone", "together"
ROWS = 8
# So that 512 tokens of a question fit into what the cache allocates next to the document.
DOCUMENT = 65536 - 512
TOKENIZER = ROOT / "examples" / "passkey-llama"
QUESTIONS = tuple(f" What is the number of the garden {i}?" for i in range(1, 1 + ROWS))
# The largest error of a logit, as a share of the largest logit: some roundings of bfloat16, which
# differ between batches.
MOST_ERROR = 8 * torch.finfo(torch.bfloat16).eps


@dataclass(frozen=True)
class Shape:
    """So many layers of a model, and as large a part of its vocabulary."""

    config: PretrainedConfig
    part: str


def _llama(layers: int, vocab_size: int, **changes: Any) -> Any:
    return llama_model.configuration(layers, vocab_size=vocab_size, **changes)


def _shapes() -> dict[str, Shape]:
    qwen3 = Qwen3Config(
        vocab_size=37984,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=7,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=1 << 17,
        tie_word_embeddings=True,
    )
    llama_8b = {"hidden_size": 4096, "intermediate_size": 14336, "head_dim": 128}
    return {
        "Llama 3.2 1B": Shape(_llama(4, 32064), "4 of 16 layers"),
        "Qwen3 0.6B": Shape(qwen3, "7 of 28 layers"),
        "Llama 3.1 8B": Shape(_llama(2, 8016, **llama_8b), "2 of 32 layers"),
        "tiny": Shape(
            _llama(2, 8016, hidden_size=64, intermediate_size=64, num_attention_heads=4,
                   num_key_value_heads=2, head_dim=16),
            "2 layers",
        ),
    }  # fmt: skip


SHAPES = _shapes()


@dataclass(frozen=True)
class DocumentCase:
    shape: str
    kv_dtype: Literal["int8", "fp8"] | None = None
    document: int = DOCUMENT
    with_ask: bool = False

    @property
    def name(self) -> str:
        return f"{self.shape}, {self.kv_dtype or 'bf16'}"


STANDARD = (
    DocumentCase("Llama 3.2 1B", with_ask=True),
    DocumentCase("Llama 3.2 1B", "int8", with_ask=True),
    DocumentCase("Qwen3 0.6B"),  # the cache has more bytes than the weights
    DocumentCase("Llama 3.1 8B", "int8"),  # and fewer
)


def run_case(case: DocumentCase, tokens: int, allowed: set[int]) -> dict[str, Any]:
    config = SHAPES[case.shape].config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="tree_attention"
        )
    model = llama_model.fill_with_repeated_numbers(model)
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    questions = tokenizer(list(QUESTIONS), return_tensors="pt", add_special_tokens=False)
    questions = questions["input_ids"]
    cache = TreeCache(config, kv_dtype=case.kv_dtype)
    llama_model.fill(cache, config, case.document)
    document_bytes = cache.num_bytes

    def read(asked: Tensor, into: TreeCache) -> Tensor:
        logits = model(input_ids=asked, **{CACHE_NAME: into}, logits_to_keep=1).logits
        return logits[:, -1].float()

    with Load() as load:
        prefill_seconds, found, together = [], torch.empty(0), cache
        for _ in range(3):
            together = cache.share(ROWS)
            begin = time.perf_counter()
            found = read(questions, together)
            prefill_seconds.append(time.perf_counter() - begin)
        wanted = torch.cat([read(asked[None], cache.share(1)) for asked in questions])
        read(questions[:1], cache)
        steps = {
            ALONE: lambda i: read(questions[:1, i : i + 1], cache),
            TOGETHER: lambda i: read(questions[:, i : i + 1], together),
        }
        samples = time_in_step(steps, num_sets=questions.shape[1], rounds=tokens)
    own = int(together.get_seq_length()) - case.document
    per_token = bytes_per_token(config, case.kv_dtype)
    row = {
        "name": case.name,
        "part": SHAPES[case.shape].part,
        "times": {name: sample.to_json() for name, sample in samples.items()},
        "ratio": ROWS * samples[ALONE].median / samples[TOGETHER].median,
        "weight_bytes": sum(x.nbytes for x in model.parameters()),
        "document_bytes": document_bytes,
        "memory": together.num_bytes / (per_token * (case.document + ROWS * own)),
        "prefill_seconds": min(prefill_seconds),
        "error": ((found - wanted).abs().max() / wanted.abs().max()).item(),
        "other_load": load.others,
    }
    row["wrong"] = not row["error"] <= MOST_ERROR
    if case.with_ask:
        del cache, together
        gc.collect()
        os.sched_setaffinity(0, allowed)  # this thread is pinned, and processes inherit that
        row |= ask(model, case)
        pin_threads()
    return row


def bytes_per_token(config: Any, kv_dtype: str | None) -> int:
    """The bytes that a token's keys and values take in all layers; those of 8 bits have a float32
    scale for each head."""
    row = 2 * config.head_dim if kv_dtype is None else config.head_dim + 4
    return int(config.num_hidden_layers * 2 * config.num_key_value_heads * row)


def ask(model: Any, case: DocumentCase) -> dict[str, Any]:
    """Seconds of the command, with a document that two ranks saved."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint, directory = Path(folder, "model"), Path(folder, "document")
        model.generation_config.eos_token_id = None
        model.save_pretrained(checkpoint)
        AutoTokenizer.from_pretrained(TOKENIZER).save_pretrained(checkpoint)
        spec = {"shape": case.shape, "kv_dtype": case.kv_dtype, "document": case.document}
        spec |= {"checkpoint": str(checkpoint), "directory": str(directory)}
        start_ranks(2, [__file__, "--save", json.dumps(spec), "--on-rank"])
        result = Path(folder, "answers.json")
        command = [sys.executable, "-m", "tree_attention", "ask", str(directory), *QUESTIONS]
        command += ["--model", str(checkpoint), "--dtype", "bfloat16", "--format", "{question}"]
        command += ["--max-new-tokens", "2", "--json", str(result)]
        if case.kv_dtype is not None:
            command += ["--kv-dtype", case.kv_dtype]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        told = json.loads(result.read_text())
        assert told["world_size"] == 1 and told["document_tokens"] == case.document
        return {"load_seconds": told["load_s"], "first_token_seconds": told["ttft_s"]}


def save_on_rank(spec: dict[str, Any], _: Ranks) -> None:
    """The document, as `tree_attention prepare` writes it."""
    config = SHAPES[spec["shape"]].config
    cache = llama_model.fill(TreeCache(config, kv_dtype=spec["kv_dtype"]), config, spec["document"])
    arguments = argparse.Namespace(model=Path(spec["checkpoint"]), weight_dtype="auto")
    facts = facts_of(arguments, SimpleNamespace(dtype=torch.bfloat16))
    save(cache, spec["directory"], torch.zeros(1, spec["document"], dtype=torch.long), facts)


def measure(cases: Sequence[DocumentCase], tokens: int) -> Report:
    allowed = os.sched_getaffinity(0)
    cpus = pin_threads()
    with torch.inference_mode(), progress_bar(True) as progress:
        rows = [run_case(case, tokens, allowed) for case in shown(progress, cases)]
    return Report(
        name="documents",
        title="Eight questions behind one document of 64k tokens",
        notes=NOTES,
        environment=environment(
            transformers=transformers.__version__, **{"pinned to CPUs": cpus or "not pinned"}
        ),
        rows=rows,
        columns=columns_of(rows, COLUMNS),
        warnings=load_warnings([row["other_load"] for row in rows]),
    )


def _tokens_per_second(row: dict[str, Any], name: str, number: int) -> str:
    return f"{1e6 * number / row['times'][name]['median_us']:.2f}"


def _seconds(name: str) -> Any:
    return lambda row: f"{row[name]:.2f}" if name in row else "-"


def _beyond(row: dict[str, Any]) -> str:
    if "first_token_seconds" not in row:
        return "-"
    return f"{row['first_token_seconds'] - row['prefill_seconds']:.2f}"


NOTES = (
    f"Whole steps of transformers with {ROWS} questions of equal length, medians of tokens that "
    "both take in turn. alone: one question, whose tokens/s are also those of eight questions one "
    f"after another. together: {ROWS} rows that share the document with TreeCache.share. Weights "
    "are random and bfloat16; of a model there are the layers that the case names and as large a "
    f"part of its vocabulary. The document is {DOCUMENT:,} random keys and values.",
    "memory: the bytes of the shared cache by those of the document's tokens once and of each "
    "row's own.",
    "prefill: all questions at once behind the document. ask: load and first token of "
    "`tree_attention ask` in one process, from the loaded document on, of a document that two "
    "ranks saved. beyond: first token less prefill.",
    "error: the largest difference of a logit, by the largest one, of the questions' last tokens "
    f"to the same questions alone; more than {MOST_ERROR:.3f} is WRONG.",
)

COLUMNS: Columns = {
    "case": lambda row: row["name"],
    "layers": lambda row: row["part"],
    "weights MB": lambda row: f"{row['weight_bytes'] / 1e6:.0f}",
    "document MB": lambda row: f"{row['document_bytes'] / 1e6:.0f}",
    "alone tokens/s": lambda row: _tokens_per_second(row, ALONE, 1),
    "together tokens/s": lambda row: _tokens_per_second(row, TOGETHER, ROWS),
    "together /alone": lambda row: f"{row['ratio']:.2f}",
    "memory": lambda row: f"{row['memory']:.3f}",
    "prefill s": _seconds("prefill_seconds"),
    "ask: load s": _seconds("load_seconds"),
    "first token s": _seconds("first_token_seconds"),
    "beyond s": _beyond,
    "error": lambda row: f"{row['error']:.1e}",
    "right": verdict,
}


def main(arguments: list[str]) -> int:
    parser = parser_of(__doc__, "documents")
    parser.add_argument("--tokens", type=int, default=8, help="timed tokens (default 8)")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="cases whose name has a TEXT")
    parser.add_argument("--save", type=json.loads, help=argparse.SUPPRESS)  # of its own ranks
    parser.add_argument("--on-rank", type=Path, help=argparse.SUPPRESS)
    parsed = parser.parse_args(arguments)
    if parsed.save is not None:
        run_rank(parsed.on_rank, lambda ranks: save_on_rank(parsed.save, ranks))
        return 0
    cases = [x for x in STANDARD if any(text in x.name for text in parsed.only or [""])]
    return finish(measure(cases, parsed.tokens), parsed.out)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
