"""Manifests held against the schemas that Kubernetes publishes, and a bundle whose benchmark says what we expect."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml

from hasten.bundle import Bundle
from hasten.cli import main
from hasten.core.report import Bench, Footprint, Report, Timing
from hasten.core.statistics import Interval
from hasten.core.tensors import Shape

MEBIBYTE = 2**20
INT8, FP32 = "onnxruntime-int8", "onnxruntime-fp32"
# The oldest that we say will do, and the newest whose schemas are known.
VERSIONS = ("1.30", kubernetes_validate.latest_version())


def measured(report: Report, *variants: str) -> Report:
    """On the report's own machine, which has two cores: 200 sentences a second, and 300 MiB."""
    timings = tuple(
        Timing(variant, Shape(8, 128), 10, 40.0, 41.0, None, 200.0, Interval(1.0, 1.0, 1.0), (40.0,))
        for variant in variants
    )
    footprints = tuple(Footprint(variant, 500.0, 300 * MEBIBYTE, 100 * MEBIBYTE) for variant in variants)
    return replace(report, bench=Bench("torch-fp32", timings, footprints))


def deployer(engine: str, bundle: Bundle, target: Path) -> Callable[..., dict[str, Any]]:
    """`deploy("--replicas", "3")`: what `hasten deploy` wrote for that engine, by file."""

    def deploy(*words: str) -> dict[str, Any]:
        assert main(["deploy", engine, str(bundle.path), "-o", str(target), "--force", *words]) == 0
        return read(target)

    return deploy


def read(folder: Path) -> dict[str, Any]:
    """Every manifest in it, by its file."""
    return {file.name: yaml.safe_load(file.read_text(encoding="utf-8")) for file in folder.glob("*.yaml")}


def check(document: dict[str, Any]) -> None:
    """Strictly: a field that the schema does not know is an error."""
    for version in VERSIONS:
        kubernetes_validate.validate(document, version, strict=True)


def as_pod(spec: dict[str, Any]) -> dict[str, Any]:
    """For what stands in a pod of somebody else's."""
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": spec}
