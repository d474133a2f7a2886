"""A bundle with an engine that no TensorRT has built: what is deployed of it is only copied, and its record read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec

from hasten.backends import MODEL, Artifact
from hasten.backends.tensorrt.planning import Order, Place, Record, profiles
from hasten.bundle import Bundle, BundleWriter
from hasten.bundle.read import TOKENIZER
from hasten.core.tensors import DType
from hasten.core.variant import Precision, Variant

PLAN = b"engine"
VARIANT = Variant("tensorrt", Precision.FP16, "cuda")


def with_engine(bundle: Bundle, folder: Path) -> Bundle:
    """A classifier's bundle once more, with the engine in front of its variants."""
    manifest, reference = bundle.manifest, bundle.reference()
    engine = Artifact(VARIANT, manifest.signature, folder / "engine", {MODEL: "model.plan"})
    order = Order(profiles(bundle.report.plan.shapes, manifest.signature.max_length))
    # Other types than the manifest says, and one input less: the engine has the last word.
    inputs = {"input_ids": DType.INT64, "attention_mask": DType.INT64}
    place = Place("NVIDIA H200", "9.0", "11.4.0")
    record = Record(place, order, VARIANT.precision, inputs, {"logits": DType.FLOAT16})
    engine.directory.mkdir()
    for name, content in (("plan", PLAN), ("onnx", b"graph"), ("json", msgspec.json.encode(record))):
        (engine.directory / f"model.{name}").write_bytes(content)
    entry = replace(
        manifest.chosen,
        name=VARIANT.name,
        backend=VARIANT.backend,
        precision=VARIANT.precision,
        device=VARIANT.device,
        graphs=dict(engine.graphs),
    )
    with BundleWriter(folder / "bundle") as writer:
        writer.add_graph(bundle.graph().path())
        for artifact in (engine, *map(bundle.artifact, manifest.variants)):
            writer.add_variant(artifact)
        writer.add_tokenizer(bundle.path / TOKENIZER)
        writer.add_reference(reference.rows, reference.outputs)
        writer.add_report(bundle.report)
        return writer.commit(replace(manifest, variants=(entry, *manifest.variants)))
