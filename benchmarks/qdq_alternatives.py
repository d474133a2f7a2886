"""What other ways than rewriting see of a model: torch.fx, torch.export, a function mode. Facts, no times.

PYTHONPATH=tests python benchmarks/qdq_alternatives.py
"""

from __future__ import annotations

import json
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.overrides import TorchFunctionMode

import tiny
from origin import origin

RESULTS = Path(__file__).parent / "results" / "qdq_alternatives.json"
FUNCTIONS = (
    torch.matmul,
    torch.Tensor.matmul,
    torch.Tensor.__matmul__,
    torch.bmm,
    torch.nn.functional.linear,
    torch.Tensor.add,
    torch.Tensor.__add__,
)


class Seeing(TorchFunctionMode):
    """Counts the calls that would be quantized, and knows nothing of who calls."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in FUNCTIONS:
            self.seen[function.__name__] += 1
        return function(*args, **(kwargs or {}))


def outcome(action: Callable[[], object]) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return "works"


def look(architecture: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        tiny.save(architecture, "ForSequenceClassification", Path(folder))
        kind = transformers.AutoModelForSequenceClassification
        model = kind.from_pretrained(folder, attn_implementation="eager").eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    feeds = dict(tokenizer(list(tiny.CORPUS[:2]), padding=True, return_tensors="pt"))
    rows, length = torch.export.Dim("rows", min=1, max=64), torch.export.Dim("length", min=2, max=60)
    shapes = {name: {0: rows, 1: length} for name in feeds}
    made = torch.export.export(model, (), feeds, dynamic_shapes=shapes, strict=False)
    module = made.module()
    mode = Seeing()
    with mode, torch.inference_mode():
        model(**feeds)
    return {
        "fx.symbolic_trace": outcome(lambda: torch.fx.symbolic_trace(model)),
        "export": {
            "calls": sum(node.op == "call_function" for node in made.graph.nodes),
            "dropouts": sum("dropout" in str(node.target) for node in made.graph.nodes),
            "is_a_transformers_model": isinstance(module, transformers.PreTrainedModel),
            "has_config": hasattr(module, "config"),
            "train": outcome(module.train),
            "with_labels": outcome(lambda: module(**feeds, labels=torch.tensor([0, 1]))),
        },
        "function_mode": dict(mode.seen),
    }


def main() -> None:
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {
        **origin(),
    }
    for architecture in ("bert", "deberta-v2", "modernbert"):
        found[architecture] = look(architecture)
    RESULTS.write_text(json.dumps(found, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
