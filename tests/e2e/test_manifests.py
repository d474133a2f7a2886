"""Validate manifests with the models of KServe's own client."""

from __future__ import annotations

import copy
import json
import os
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("kubernetes_validate", reason="manifests are validated with Kubernetes' schemas")


from hasten.bundle import open_bundle
from hasten.cli import main
from hasten.core.variant import Variant
from scripts import kserve_models
from support import kubernetes_schemas, virtualenvs
from support.fakes.engine_bundle import with_variant

STORED = "--storage s3://models/search"
OPTIONS = [
    "",
    f"{STORED} --protocol grpc-v2 --cluster-wide --keys-secret keys",
    f"{STORED} --mode knative --protocol grpc-v2",
    "--mode knative --threads 1 --instances 2",
    "--prometheus http://prometheus.monitoring:9090 --namespace search",
    f"--runtime tritonserver {STORED} --image tritonserver-tokenizers:1",
]
Check = Callable[[list[Any]], list[list[str]]]


@pytest.fixture(scope="module")
def check() -> Check:
    """Validate with KServe's client, installed without its dependencies, whose pins conflict with hasten's."""
    folder = virtualenvs.folder("kserve")
    python = virtualenvs.python(folder, "--no-deps kserve", "kubernetes six")

    def run(documents: list[Any]) -> list[list[str]]:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        process = subprocess.run(
            [python, kserve_models.__file__],
            input=json.dumps(documents),
            capture_output=True,
            text=True,
            check=False,
            env=environment,
        )
        assert process.returncode == 0, process.stderr
        errors: list[list[str]] = json.loads(process.stdout)
        return errors

    return run


@pytest.fixture(scope="module")
def bundle(tiny_classifier: Any, quick_build: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("bundles") / "classifier"
    return quick_build(tiny_classifier("bert"), target, variants=["onnxruntime-fp32"]).path


def write_manifests(bundle: Path, target: Path, words: str) -> list[Any]:
    assert main(["deploy", "kserve", str(bundle), "-o", str(target), *shlex.split(words)]) == 0
    return [document for document in kubernetes_schemas.read(target).values() if document["kind"] != "Kustomization"]


@pytest.fixture(scope="module")
def on_gpu(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same bundle with a GPU variant as the fastest."""
    variant, plain = Variant.parse("onnxruntime-fp16@cuda"), open_bundle(bundle)
    folder = tmp_path_factory.mktemp("gpu")
    return with_variant(plain, folder, variant, {"model.onnx": plain.graph().path().read_bytes()}).path


@pytest.mark.parametrize("fixture", ["bundle", "on_gpu"])
def test_kserves_client_accepts_the_manifests(
    check: Check, fixture: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    bundle = request.getfixturevalue(fixture)
    documents = [
        document
        for number, words in enumerate(OPTIONS)
        for document in write_manifests(bundle, tmp_path / str(number), words)
    ]
    assert ("nvidia.com/gpu" in json.dumps(documents)) == (fixture == "on_gpu")
    assert {document["kind"] for document in documents} == {
        "InferenceService",
        "ServingRuntime",
        "ClusterServingRuntime",
    }
    assert check(documents) == [[]] * len(documents)


def test_kserves_client_rejects_invalid_manifests(check: Check, bundle: Path, tmp_path: Path) -> None:
    """One defect at a time; this shows that the test above can fail."""
    documents = {document["kind"]: document for document in write_manifests(bundle, tmp_path / "whole", STORED)}
    service, runtime = documents["InferenceService"], documents["ServingRuntime"]
    breaks: list[tuple[Any, Callable[[Any], object]]] = [
        (service, lambda spec: spec["predictor"].update(minReplicas="two")),
        (service, lambda spec: spec["predictor"].update(minimumReplicas=2)),
        (service, lambda spec: spec["predictor"]["model"].pop("modelFormat")),
        (service, lambda spec: spec["predictor"]["model"].update(storageURI="s3://models")),
        (service, lambda spec: spec["predictor"]["model"]["ports"][0].pop("containerPort")),
        (runtime, lambda spec: spec.pop("containers")),
        (runtime, lambda spec: spec["supportedModelFormats"][0].update(autoSelect="yes")),
        (runtime, lambda spec: spec["containers"][0]["env"][0].update(vaule="x")),
        (runtime, lambda spec: spec.update(protocolVersions="v2")),
    ]
    broken = []
    for document, change in breaks:
        invalid = copy.deepcopy(document)
        change(invalid["spec"])
        broken.append(invalid)
    results = check(broken)
    assert [bool(errors) for errors in results] == [True] * len(breaks), results
