# SPDX-License-Identifier: BSD-3-Clause
"""llama.cpp by its Python binding; the form is the dtype, with "-flash" for flash attention."""

from llama_cpp import Llama, __version__

from . import timing
from .gguf_file import gguf_file


def main() -> None:
    asked = timing.arguments()
    dtype, _, attention = asked.form.partition("-")
    model = Llama(
        str(gguf_file(asked.checkpoint, dtype)),
        n_ctx=timing.longest(asked),
        n_threads=timing.THREADS,
        n_threads_batch=timing.THREADS,
        flash_attn=attention == "flash",
        verbose=False,
    )
    for context, tokens in timing.rounds(asked):
        model.reset()
        inputs = timing.prompt(context)
        arrivals = timing.Arrivals()
        for _ in range(tokens):
            model.eval(inputs)
            inputs = [model.sample(temp=0.0)]
            arrivals.add(inputs[0])
    arrivals.say(f"llama-cpp-python {__version__}")


if __name__ == "__main__":
    main()
