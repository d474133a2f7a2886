"""What is written for Kubernetes and KServe, taken by Kustomize itself and by the models of KServe's own client."""

from __future__ import annotations

import copy
import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("kubernetes_validate", reason="manifests.py holds manifests against Kubernetes' schemas")

import yaml

import installed
import kserve_models
import manifests
from engines import with_variant
from hasten.bundle import open_bundle
from hasten.cli import main
from hasten.core.variant import Variant

STORED = "--storage s3://models/search"
WAYS = [
    "",
    f"{STORED} --protocol grpc-v2 --cluster-wide --keys-secret keys",
    f"{STORED} --mode knative --protocol grpc-v2",
    "--mode knative --threads 1 --instances 2",
    "--prometheus http://prometheus.monitoring:9090 --namespace search",
    f"--runtime tritonserver {STORED} --image tritonserver-tokenizers:1",
]
Check = Callable[[list[Any]], list[list[str]]]


@pytest.fixture(scope="module")
def check(pytestconfig: pytest.Config) -> Check:
    """It pins what we do not (NumPy, FastAPI, Ray), so it comes without what it depends on; its models need little."""
    place = installed.folder(pytestconfig, "kserve")
    python = installed.python(place, "--no-deps kserve", "kubernetes six")

    def run(documents: list[Any]) -> list[list[str]]:
        clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            [python, kserve_models.__file__],
            input=json.dumps(documents),
            capture_output=True,
            text=True,
            check=False,
            env=clean,
        )
        assert done.returncode == 0, done.stderr
        found: list[list[str]] = json.loads(done.stdout)
        return found

    return run


@pytest.fixture(scope="module")
def bundle(tiny_classifier: Any, quick_build: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("bundles") / "classifier"
    return quick_build(tiny_classifier("bert"), target, variants=["onnxruntime-fp32"]).path


def written(bundle: Path, target: Path, words: str) -> list[Any]:
    assert main(["deploy", "kserve", str(bundle), "-o", str(target), *shlex.split(words)]) == 0
    return [document for document in manifests.read(target).values() if document["kind"] != "Kustomization"]


@pytest.fixture(scope="module")
def on_gpu(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a variant for GPUs in front."""
    variant, plain = Variant.parse("onnxruntime-fp16@cuda"), open_bundle(bundle)
    folder = tmp_path_factory.mktemp("gpu")
    return with_variant(plain, folder, variant, {"model.onnx": plain.graph().path().read_bytes()}).path


@pytest.mark.parametrize("which", ["bundle", "on_gpu"])
def test_the_models_of_its_client_take_what_is_written(
    check: Check, which: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    bundle = request.getfixturevalue(which)
    documents = [
        document for place, words in enumerate(WAYS) for document in written(bundle, tmp_path / str(place), words)
    ]
    assert ("nvidia.com/gpu" in json.dumps(documents)) == (which == "on_gpu")
    assert {document["kind"] for document in documents} == {
        "InferenceService",
        "ServingRuntime",
        "ClusterServingRuntime",
    }
    assert check(documents) == [[]] * len(documents)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("words", ["kubernetes {}", f"kserve {{}} {STORED} --cluster-wide"])
def test_kubectl_puts_it_together(bundle: Path, tmp_path: Path, words: str) -> None:
    """Kustomize itself, which needs no cluster: all of it, and nothing changed."""
    target = tmp_path / "written"
    command = [*shlex.split(words.format(bundle)), "-o", str(target), "--namespace", "search"]
    assert main(["deploy", *command]) == 0
    done = subprocess.run(["kubectl", "kustomize", target], capture_output=True, text=True, check=True)
    listed = yaml.safe_load((target / "kustomization.yaml").read_text())["resources"]
    documents = [yaml.safe_load((target / name).read_text()) for name in listed]
    made = {document["kind"]: document for document in yaml.safe_load_all(done.stdout)}
    assert made == {document["kind"]: document for document in documents}


def test_they_refuse_what_is_broken(check: Check, bundle: Path, tmp_path: Path) -> None:
    """One thing at a time: without this the test above would prove nothing."""
    documents = {document["kind"]: document for document in written(bundle, tmp_path / "whole", STORED)}
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
        one = copy.deepcopy(document)
        change(one["spec"])
        broken.append(one)
    found = check(broken)
    assert [bool(errors) for errors in found] == [True] * len(breaks), found
