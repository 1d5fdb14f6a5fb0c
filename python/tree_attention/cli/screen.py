# SPDX-License-Identifier: BSD-3-Clause
"""A generation on the terminal: the prompt, the text, and the measurements."""

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table


def excerpt(text: str) -> str:
    """The text on one line, and of a long one its beginning and its end."""
    text = " ".join(text.split())
    return text if len(text) <= 240 else f"{text[:110]} [...] {text[-110:]}"


class Screen:
    """The screen during a generation: the prompt, a bar during prefill, then the text.

    Only the root rank shows anything; the other ranks run the same code in silence.
    """

    def __init__(
        self, root: bool, text: str, prompt_tokens: int, model: Any, tokenizer: Any
    ) -> None:
        from transformers import TextStreamer

        self.console = Console(quiet=not root, highlight=False)
        self._text, self._prompt_tokens, self._model = text, prompt_tokens, model
        # The bar goes to stderr, so that a redirected stdout holds the text alone.
        errors = Console(stderr=True)
        self._progress = Progress(
            TextColumn("prefill"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=errors,
            transient=True,
            disable=not (root and errors.is_terminal),
        )
        screen = self

        class Printer(TextStreamer):
            def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
                screen.show(text, stream_end)

        self.streamer = Printer(tokenizer, skip_prompt=True, skip_special_tokens=True)

    def __enter__(self) -> "Screen":
        text = f"Prompt ({self._prompt_tokens:,} tokens): {excerpt(self._text)}"
        self.console.print(text, style="dim", markup=False)
        self._task = self._progress.add_task("prefill", total=self._prompt_tokens)
        self._hook = self._model.register_forward_hook(self._forwarded, with_kwargs=True)
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._hook.remove()
        self._end_progress()

    def _end_progress(self) -> None:
        if self._progress.live.is_started:
            self._progress.stop()

    def _forwarded(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        self._progress.advance(self._task, kwargs["input_ids"].shape[1])

    def show(self, text: str, end: bool) -> None:
        self._end_progress()  # the first token ends the prefill
        self.console.out(text, end="\n" if end else "")


def table(measured: dict[str, Any], attention: str, world_size: int) -> Table:
    processes = f"{world_size} process{'es' if world_size > 1 else ''}"
    result = Table(title=f"{attention}, {processes}", title_justify="left", show_header=False)
    rows = [
        ("prompt, new tokens", f"{measured['prompt_tokens']:,}, {measured['new_tokens']}"),
        ("time to first token", f"{measured['ttft_s']:.3f} s"),
        ("prefill", f"{measured['prefill_tokens_per_s']:,.0f} tokens/s"),
    ]
    if "tokens_per_s" in measured:
        rows += [
            (
                "inter-token latency p50, p99",
                f"{measured['inter_token_p50_ms']:.2f}, {measured['inter_token_p99_ms']:.2f} ms",
            ),
            ("decode", f"{measured['tokens_per_s']:.1f} tokens/s"),
            (
                "bytes sent per token and rank",
                f"{measured['merge_bytes_per_token']:,.0f} merge, "
                f"{measured['sum_bytes_per_token']:,.0f} sums",
            ),
            ("exchange's share of decode time", f"{100 * measured['exchange_share']:.0f} %"),
        ]
    rows += [
        ("weights per rank", f"{measured['weight_bytes_per_rank'] / 2**20:.2f} MiB"),
        ("key/value cache per rank", f"{measured['kv_bytes_per_rank'] / 2**20:.2f} MiB"),
    ]
    for row in rows:
        result.add_row(*row)
    return result
