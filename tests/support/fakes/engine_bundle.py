"""Add fake TensorRT engines to bundles; deploying them only copies files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import msgspec

from hasten.backends import MODEL, Artifact
from hasten.backends.tensorrt.engine_spec import EnginePlatform, EngineRecord, EngineSpec, profiles
from hasten.bundle import Bundle, BundleWriter
from hasten.bundle.read import TOKENIZER
from hasten.core.report import Bench
from hasten.core.tensors import DType
from hasten.core.variant import Precision, Variant

PLAN = b"engine"
VARIANT = Variant("tensorrt", Precision.FP16, "cuda")


def with_engine(bundle: Bundle, folder: Path) -> Bundle:
    """Return a copy of a classifier's bundle with an engine as its first variant."""
    spec = EngineSpec(profiles(bundle.report.plan.shapes, bundle.manifest.signature.max_length))
    # Types that differ from the manifest's, and one input less: the engine's record takes precedence.
    inputs = {"input_ids": DType.INT64, "attention_mask": DType.INT64}
    platform = EnginePlatform("NVIDIA H200", "9.0", "11.4.0")
    record = EngineRecord(platform, spec, VARIANT.precision, inputs, {"logits": DType.FLOAT16})
    files = {"model.plan": PLAN, "model.onnx": b"graph", "model.json": msgspec.json.encode(record)}
    return with_variant(bundle, folder, VARIANT, files)


def with_variant(bundle: Bundle, folder: Path, variant: Variant, files: Mapping[str, bytes]) -> Bundle:
    """Return a copy of a bundle with another first variant, as fast as the old one; its first file is the graph."""
    manifest, reference = bundle.manifest, bundle.reference()
    added = Artifact(variant, manifest.signature, folder / variant.backend, {MODEL: next(iter(files))})
    added.directory.mkdir()
    for name, content in files.items():
        (added.directory / name).write_bytes(content)
    entry = replace(
        manifest.chosen,
        name=variant.name,
        backend=variant.backend,
        precision=variant.precision,
        device=variant.device,
        graphs=dict(added.graphs),
    )
    with BundleWriter(folder / "bundle") as writer:
        writer.add_graph(bundle.graph().path())
        for artifact in (added, *map(bundle.artifact, manifest.variants)):
            writer.add_variant(artifact)
        writer.add_tokenizer(bundle.path / TOKENIZER)
        writer.add_reference(reference.rows, reference.outputs)
        writer.add_report(
            replace(bundle.report, bench=_with_equal_timings(bundle.report.bench, variant.name, manifest.chosen.name))
        )
        return writer.commit(replace(manifest, variants=(entry, *manifest.variants)))


def _with_equal_timings(bench: Bench, variant: str, other: str) -> Bench:
    timings = [replace(timing, variant=variant) for timing in bench.timings if timing.variant == other]
    footprints = [replace(footprint, variant=variant) for footprint in bench.footprints if footprint.variant == other]
    return replace(bench, timings=(*timings, *bench.timings), footprints=(*footprints, *bench.footprints))
