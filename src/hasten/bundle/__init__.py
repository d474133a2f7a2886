"""Read and write bundles: self-contained directories that are written once and never changed.

manifest.json            model, task, tensors, variants, hashes, machine, versions
report.json              measurements of the build; report.html shows them
graph/model.onnx         the graph every variant comes from, in fp32 unless the source has a lower precision
variants/<name>/…        the chosen variant and the next eligible one
tokenizer/tokenizer.json
transformers/…           the configurations of model and tokenizer that transformers reads
reference/inputs.jsonl   input rows; outputs.npz has the outputs of the original model
"""

from hasten.bundle.manifest import Manifest, VariantEntry
from hasten.bundle.read import Bundle, open_bundle
from hasten.bundle.write import BundleWriter

__all__ = ["Bundle", "BundleWriter", "Manifest", "VariantEntry", "open_bundle"]
