# SPDX-License-Identifier: BSD-3-Clause
"""The command line of `python -m tree_attention generate`."""

import argparse
from pathlib import Path

import torch

from ... import strategies
from ..usage import UsageError, check_can_be_written, check_seconds

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tree_attention generate",
        description="Greedy text from a checkpoint. Under torchrun every process keeps its share "
        "of the key/value cache, and of the weights if they are split.",
    )
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="checkpoint")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT")
    prompt.add_argument("--prompt-file", type=Path, metavar="FILE", help="UTF-8 text")
    parser.add_argument(
        "--max-new-tokens", type=int, default=64, help="tokens to generate (default 64)"
    )
    parser.add_argument(
        "--attention",
        choices=("tree_attention", "sdpa"),
        default="tree_attention",
        help="sdpa is plain HuggingFace in one process, for comparison",
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto takes CUDA where every process of this machine has a GPU (default auto)",
    )
    parser.add_argument(
        "--dtype",
        choices=("auto", *DTYPES),
        default="auto",
        help="of the weights; auto takes the checkpoint's (default auto)",
    )
    parser.add_argument(
        "--kv-dtype",
        choices=("auto", "int8", "fp8"),
        default="auto",
        help="of the cache; auto takes --dtype's, the others 8 bits and a scale for each token and "
        "head (default auto)",
    )
    parser.add_argument(
        "--weights",
        choices=("auto", "split", "replicated"),
        default="auto",
        help="auto splits them over the processes if the model can be split (default auto)",
    )
    parser.add_argument(
        "--tensor-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="split heads over N neighbouring processes, and the cache over the rest (default 1)",
    )
    parser.add_argument(
        "--prefill",
        choices=("auto", "split", "replicated"),
        default="auto",
        help="with replicated weights: split deals the prompt's tokens to the processes, auto does "
        "so with long ones (default auto)",
    )
    parser.add_argument(
        "--strategy",
        choices=("auto", *strategies()),
        default="auto",
        help="how the ranks exchange their partial results (default auto)",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=30.0,
        help="seconds to wait for another rank to start, to load or to answer (default 30)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write tokens and measurements")
    parser.add_argument(
        "--same-tokens-as",
        type=Path,
        metavar="FILE",
        help="fail unless the new tokens equal those in the --json file of another run",
    )
    parsed = parser.parse_args(arguments)
    _check(parsed)
    return parsed


def _check(arguments: argparse.Namespace) -> None:
    if arguments.max_new_tokens < 1:
        raise UsageError(f"--max-new-tokens must be at least 1, got {arguments.max_new_tokens}")
    if arguments.tensor_parallel_size < 1:
        raise UsageError(
            f"--tensor-parallel-size must be at least 1, got {arguments.tensor_parallel_size}"
        )
    needs_whole = arguments.weights == "replicated" or arguments.prefill == "split"
    if needs_whole and arguments.tensor_parallel_size != 1:
        raise UsageError(
            f"--tensor-parallel-size {arguments.tensor_parallel_size} splits weights: leave "
            "--weights replicated and --prefill split out"
        )
    if arguments.prefill == "split" and arguments.weights == "split":
        raise UsageError(
            "--prefill split deals the prompt to processes that have all weights: leave it out, or "
            "take --weights replicated"
        )
    if arguments.kv_dtype != "auto" and arguments.attention == "sdpa":
        raise UsageError(
            f"--kv-dtype {arguments.kv_dtype} needs --attention tree_attention: plain HuggingFace "
            "attends to keys in the dtype of the weights"
        )
    check_seconds("--timeout", arguments.timeout)
    if arguments.json is not None:
        check_can_be_written("--json", arguments.json)
