# SPDX-License-Identifier: BSD-3-Clause
"""llama.cpp by its Python binding; the form is the dtype, with "-flash" for flash attention."""

import ctypes
from pathlib import Path

import llama_cpp

from . import timing
from .gguf_file import write_gguf

# In which llama.cpp itself writes files, with the embedding as it is in those that are published.
QUANTISED = {
    "q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
    "q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
}


def quantise(path: Path, source: Path, dtype: str) -> None:
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype, parameters.nthread = QUANTISED[dtype], timing.THREADS
    status = llama_cpp.llama_model_quantize(
        str(source).encode(), str(path).encode(), ctypes.byref(parameters)
    )
    if status:
        raise RuntimeError(f"llama_model_quantize: status {status} for {dtype}")


def file_of(checkpoint: Path, dtype: str) -> Path:
    path = checkpoint / f"model-{dtype}.gguf"
    if dtype in QUANTISED:
        return timing.written(path, quantise, file_of(checkpoint, "f16"), dtype)
    return timing.written(path, write_gguf, checkpoint, dtype)


def leave_out_amx() -> None:
    """Its products of quantised weights with AMX end the process by an illegal instruction where a
    thread multiplies that has loaded no configuration of tiles."""
    make = llama_cpp.llama_cpp.llama_model_default_params

    def parameters() -> llama_cpp.llama_model_params:
        made = make()
        made.use_extra_bufts = False
        return made

    llama_cpp.llama_cpp.llama_model_default_params = parameters


def main() -> None:
    asked = timing.arguments()
    dtype, _, attention = asked.form.partition("-")
    if dtype in QUANTISED:
        leave_out_amx()
    model = llama_cpp.Llama(
        str(file_of(asked.checkpoint, dtype)),
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
    num_bytes = llama_cpp.llama_model_size(model.model)
    arrivals.say(f"llama-cpp-python {llama_cpp.__version__}", num_bytes)


if __name__ == "__main__":
    main()
