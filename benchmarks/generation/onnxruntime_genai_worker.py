"""Generate with onnxruntime-genai.

    onnxruntime_genai_worker.py convert MODEL FOLDER PRECISION     # run its model builder
    onnxruntime_genai_worker.py serve FOLDER

Needs onnxruntime-genai; its model builder also needs torch, transformers and onnx.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
from worker import THREADS, Generate, serve


def convert(model: str, folder: Path, precision: str) -> None:
    """Write the model for the CPU provider, set to the number of threads that every contender gets."""
    builder = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", model, "-o", str(folder)]
    subprocess.run([*builder, "-p", precision, "-e", "cpu", "-c", str(folder / "cache")], check=True)
    file = folder / "genai_config.json"
    config = json.loads(file.read_text())
    config["model"]["decoder"]["session_options"]["intra_op_num_threads"] = THREADS
    file.write_text(json.dumps(config, indent=1))


def load(folder: str) -> Generate:
    """Return greedy decoding; all prompts of a batch have the same length."""
    import onnxruntime_genai

    model = onnxruntime_genai.Model(folder)

    def generate(prompts: list[list[int]], tokens: int, _: list[int]) -> list[list[int]]:
        length = len(prompts[0])
        options = onnxruntime_genai.GeneratorParams(model)
        # The minimum length suppresses the end-of-text ids of the model's configuration.
        options.set_search_options(
            do_sample=False, batch_size=len(prompts), min_length=length + tokens, max_length=length + tokens
        )
        generator = onnxruntime_genai.Generator(model, options)
        generator.append_tokens(np.array(prompts, np.int32))
        for _ in range(tokens):
            generator.generate_next_token()
        return [generator.get_sequence(index)[length:].tolist() for index in range(len(prompts))]

    return generate


if __name__ == "__main__":
    if sys.argv[1] == "convert":
        convert(sys.argv[2], Path(sys.argv[3]), sys.argv[4])
    else:
        serve(lambda: load(sys.argv[2]))
