"""Bundles with variants that nobody has built here: what is deployed of them is only copied."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import msgspec

from hasten.backends import MODEL, Artifact
from hasten.backends.tensorrt.planning import Order, Place, Record, profiles
from hasten.bundle import Bundle, BundleWriter
from hasten.bundle.read import TOKENIZER
from hasten.core.report import Bench
from hasten.core.tensors import DType
from hasten.core.variant import Precision, Variant

PLAN = b"engine"
VARIANT = Variant("tensorrt", Precision.FP16, "cuda")


def with_engine(bundle: Bundle, folder: Path) -> Bundle:
    """A classifier's bundle once more, with the engine in front of its variants."""
    order = Order(profiles(bundle.report.plan.shapes, bundle.manifest.signature.max_length))
    # Other types than the manifest says, and one input less: the engine has the last word.
    inputs = {"input_ids": DType.INT64, "attention_mask": DType.INT64}
    place = Place("NVIDIA H200", "9.0", "11.4.0")
    record = Record(place, order, VARIANT.precision, inputs, {"logits": DType.FLOAT16})
    files = {"model.plan": PLAN, "model.onnx": b"graph", "model.json": msgspec.json.encode(record)}
    return with_variant(bundle, folder, VARIANT, files)


def with_variant(bundle: Bundle, folder: Path, variant: Variant, files: Mapping[str, bytes]) -> Bundle:
    """A bundle once more, with that in front of its variants, as fast as the first; the first file is its graph."""
    manifest, reference = bundle.manifest, bundle.reference()
    made = Artifact(variant, manifest.signature, folder / variant.backend, {MODEL: next(iter(files))})
    made.directory.mkdir()
    for name, content in files.items():
        (made.directory / name).write_bytes(content)
    entry = replace(
        manifest.chosen,
        name=variant.name,
        backend=variant.backend,
        precision=variant.precision,
        device=variant.device,
        graphs=dict(made.graphs),
    )
    with BundleWriter(folder / "bundle") as writer:
        writer.add_graph(bundle.graph().path())
        for artifact in (made, *map(bundle.artifact, manifest.variants)):
            writer.add_variant(artifact)
        writer.add_tokenizer(bundle.path / TOKENIZER)
        writer.add_reference(reference.rows, reference.outputs)
        writer.add_report(
            replace(bundle.report, bench=_as_fast(bundle.report.bench, variant.name, manifest.chosen.name))
        )
        return writer.commit(replace(manifest, variants=(entry, *manifest.variants)))


def _as_fast(bench: Bench, variant: str, other: str) -> Bench:
    timings = [replace(one, variant=variant) for one in bench.timings if one.variant == other]
    footprints = [replace(one, variant=variant) for one in bench.footprints if one.variant == other]
    return replace(bench, timings=(*timings, *bench.timings), footprints=(*footprints, *bench.footprints))
