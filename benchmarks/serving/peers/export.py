"""Export a classifier with `torch.onnx.export` as tutorials do: `export.py MODEL TARGET`."""

from __future__ import annotations

import sys

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer


class Logits(torch.nn.Module):
    """A classifier that returns its logits only."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask, token_type_ids):
        """Return the logits."""
        return self.model(input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids).logits


def main(source: str, target: str) -> None:
    """Export the model."""
    model = Logits(AutoModelForSequenceClassification.from_pretrained(source)).eval()
    example = AutoTokenizer.from_pretrained(source)(["a text", "another"], padding=True, return_tensors="pt")
    names = ["input_ids", "attention_mask", "token_type_ids"]
    axes = {0: "batch", 1: "sequence"}
    with torch.inference_mode():
        torch.onnx.export(
            model,
            tuple(example.get(name, torch.zeros_like(example["input_ids"])) for name in names),
            target,
            dynamo=False,
            opset_version=17,
            input_names=names,
            output_names=["logits"],
            dynamic_axes=dict.fromkeys(names, axes) | {"logits": {0: "batch"}},
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
