"""Generate with OpenVINO GenAI.

    openvino_genai_worker.py convert MODEL FOLDER PRECISION        # run optimum-cli
    openvino_genai_worker.py serve FOLDER ARITHMETIC               # of activations: f32 or bf16

Needs openvino-genai and openvino-tokenizers; the conversion also needs optimum-intel, nncf and transformers 4.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
from worker import THREADS, Generate, serve


def convert(model: str, folder: Path, precision: str) -> None:
    """Write the model and its tokenizer in OpenVINO's format."""
    command = [str(Path(sys.executable).parent / "optimum-cli"), "export", "openvino", "--model", model]
    command += ["--task", "text-generation-with-past", "--weight-format", precision]
    if precision == "int4":
        # The default of 128 does not divide the layers of small models.
        command += ["--group-size", "64"]
    subprocess.run([*command, str(folder)], check=True)


def load(folder: str, arithmetic: str) -> Generate:
    """Return greedy decoding through the paged-attention pipeline; all prompts of a batch have the same length."""
    import openvino
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False  # prompts repeat
    options = {"INFERENCE_NUM_THREADS": THREADS, "INFERENCE_PRECISION_HINT": arithmetic}
    pipeline = openvino_genai.LLMPipeline(folder, "CPU", scheduler_config=scheduler, **options)

    def generate(prompts: list[list[int]], tokens: int, eos_ids: list[int]) -> list[list[int]]:
        config = openvino_genai.GenerationConfig(
            max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, eos_token_id=eos_ids[0]
        )
        config.stop_token_ids = set(eos_ids)
        ids = np.array(prompts, np.int64)
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        return [list(tokens) for tokens in pipeline.generate(inputs, config).tokens]

    return generate


if __name__ == "__main__":
    if sys.argv[1] == "convert":
        convert(sys.argv[2], Path(sys.argv[3]), sys.argv[4])
    else:
        serve(lambda: load(*sys.argv[2:4]))
