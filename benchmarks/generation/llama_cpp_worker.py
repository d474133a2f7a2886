"""Generate with llama.cpp.

    llama_cpp_worker.py convert GGUF FOLDER     # write the model in F32, F16 and Q8_0
    llama_cpp_worker.py serve GGUF

Needs llama-cpp-python, compiled on this machine: `pip install --no-binary llama-cpp-python llama-cpp-python`, which
enables the CPU's own instructions.
"""

from __future__ import annotations

import sys
from pathlib import Path

import llama_cpp
import numpy as np
from worker import BATCH_SIZE, MAX_CONTEXT, THREADS, Generate, serve

FORMATS = {
    "F32": llama_cpp.LLAMA_FTYPE_ALL_F32,
    "F16": llama_cpp.LLAMA_FTYPE_MOSTLY_F16,
    "Q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
}
_MAX_BATCH = 2048


def convert(source: Path, folder: Path) -> None:
    """Write a model in every format, through F32: all have the weights of the source, or their rounding."""
    for name, file_type in FORMATS.items():
        options = llama_cpp.llama_model_quantize_default_params()
        options.ftype, options.allow_requantize = file_type, True
        target = folder / f"{name}.gguf"
        if llama_cpp.llama_model_quantize(bytes(source), bytes(target), options):
            raise SystemExit(f"llama.cpp could not convert {source} to {name}")
        source = folder / "F32.gguf"


def load(file: str) -> Generate:
    """Return greedy decoding; the sequences of a batch share its decode steps."""
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(file.encode(), llama_cpp.llama_model_default_params())
    options = llama_cpp.llama_context_default_params()
    options.n_threads = options.n_threads_batch = THREADS
    options.n_ctx, options.n_batch, options.n_seq_max = BATCH_SIZE * MAX_CONTEXT, _MAX_BATCH, BATCH_SIZE
    context = llama_cpp.llama_init_from_model(model, options)
    cache = llama_cpp.llama_get_memory(context)
    vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    batch = llama_cpp.llama_batch_init(_MAX_BATCH, 0, 1)

    def next_tokens(sequences: list[list[int]], position: int, eos_ids: list[int]) -> list[int]:
        """Append tokens to every sequence at a position, and return the most likely next ones."""
        index, last = 0, []
        for sequence, ids in enumerate(sequences):
            for offset, token in enumerate(ids):
                batch.token[index], batch.pos[index] = token, position + offset
                batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
                batch.logits[index] = offset == len(ids) - 1
                index += 1
            last.append(index - 1)
        batch.n_tokens = index
        if llama_cpp.llama_decode(context, batch):
            raise RuntimeError(f"llama.cpp failed on {index} tokens")
        chosen = []
        for index in last:
            logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, index), (vocab_size,))
            logits[eos_ids] = -np.inf
            chosen.append(int(logits.argmax()))
        return chosen

    def generate(prompts: list[list[int]], tokens: int, eos_ids: list[int]) -> list[list[int]]:
        llama_cpp.llama_memory_clear(cache, False)
        chosen = next_tokens(prompts, 0, eos_ids)
        generated = [[token] for token in chosen]
        for step in range(tokens - 1):
            chosen = next_tokens([[token] for token in chosen], len(prompts[0]) + step, eos_ids)
            for sequence, token in zip(generated, chosen, strict=True):
                sequence.append(token)
        return generated

    return generate


if __name__ == "__main__":
    if sys.argv[1] == "convert":
        convert(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        serve(lambda: load(sys.argv[2]))
