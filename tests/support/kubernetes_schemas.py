"""Validate manifests with the published Kubernetes schemas, and make a report with known benchmark results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml

from hasten.bundle import Bundle
from hasten.cli import main
from hasten.core.report import Bench, Footprint, Interval, Report, Timing
from hasten.core.tensors import Shape

MEBIBYTE = 2**20
INT8, FP32 = "onnxruntime-int8", "onnxruntime-fp32"
# The oldest supported version, and the newest whose schemas are available.
VERSIONS = ("1.30", kubernetes_validate.latest_version())


def measured(report: Report, *variants: str) -> Report:
    """Return the report with a benchmark of 200 rows/s and 300 MiB on two cores."""
    timings = tuple(
        Timing(variant, Shape(8, 128), 10, 40.0, 41.0, None, 200.0, Interval(1.0, 1.0, 1.0), (40.0,))
        for variant in variants
    )
    footprints = tuple(Footprint(variant, 500.0, 300 * MEBIBYTE, 100 * MEBIBYTE) for variant in variants)
    return replace(report, bench=Bench("torch-fp32", timings, footprints))


def deployer(engine: str, bundle: Bundle, target: Path) -> Callable[..., dict[str, Any]]:
    """Return a function that runs `hasten deploy ENGINE` with more options and returns its manifests by file."""

    def deploy(*options: str) -> dict[str, Any]:
        assert main(["deploy", engine, str(bundle.path), "-o", str(target), "--force", *options]) == 0
        return read(target)

    return deploy


def read(folder: Path) -> dict[str, Any]:
    """Return the manifests in a folder by file name."""
    return {file.name: yaml.safe_load(file.read_text(encoding="utf-8")) for file in folder.glob("*.yaml")}


def check(document: dict[str, Any]) -> None:
    """Validate strictly: an unknown field is an error."""
    for version in VERSIONS:
        kubernetes_validate.validate(document, version, strict=True)


def as_pod(spec: dict[str, Any]) -> dict[str, Any]:
    """Return a Pod with this spec, to validate a pod spec that is part of another resource."""
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": spec}
