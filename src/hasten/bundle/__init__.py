"""The bundle: a self-contained directory that is written once and never changed.

manifest.json            what it is: model, task, tensors, variants, hashes, machine, versions
report.json              what was measured when it was built
graph/model.onnx         the graph every variant comes from, in fp32 unless it was given in less
variants/<name>/…        the chosen variant and the next eligible one
tokenizer/tokenizer.json
transformers/…           the configurations of model and tokenizer that transformers reads
reference/inputs.jsonl   texts and, in outputs.npz, what the original answered
"""

from hasten.bundle.manifest import Manifest, VariantEntry
from hasten.bundle.read import Bundle, open_bundle
from hasten.bundle.write import BundleWriter

__all__ = ["Bundle", "BundleWriter", "Manifest", "VariantEntry", "open_bundle"]
