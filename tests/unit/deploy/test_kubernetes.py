from __future__ import annotations

import copy
import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("kubernetes_validate", reason="manifests are validated with Kubernetes' schemas")

import kubernetes_validate
import yaml

from hasten.bundle import Bundle
from hasten.cli import main
from hasten.core.report import Report
from hasten.core.version import __version__
from hasten.server.settings import Settings
from support import kubernetes_schemas
from support.kubernetes_schemas import FP32, INT8

KINDS = {
    "deployment.yaml": "Deployment",
    "service.yaml": "Service",
    "disruption.yaml": "PodDisruptionBudget",
    "autoscaler.yaml": "HorizontalPodAutoscaler",
}


@pytest.fixture
def model(tmp_path: Path, write_bundle: Callable[..., Bundle], report: Report) -> Bundle:
    return write_bundle(tmp_path / "sst2", measured=kubernetes_schemas.measured(report, INT8, FP32))


@pytest.fixture
def deploy(model: Bundle, tmp_path: Path) -> Callable[..., Any]:
    return kubernetes_schemas.deployer("kubernetes", model, tmp_path / "k8s")


def container(written: Any) -> Any:
    return written["deployment.yaml"]["spec"]["template"]["spec"]["containers"][0]


def environment(written: Any) -> dict[str, str]:
    return {entry["name"]: entry["value"] for entry in container(written)["env"] if "value" in entry}


# --- the published schemas


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--volume-claim models --namespace search",
        "--image registry.example:5000/team/sst2:1 --keys-secret keys --drain-timeout 90s",
        "--threads 2 --instances 4 --replicas 30 --max-replicas 60",
        f"--variant {FP32} --replicas 3 --max-replicas 3",
    ],
)
def test_manifests_match_the_published_schemas(deploy: Any, words: str) -> None:
    written = deploy(*shlex.split(words))
    documents = {name: document for name, document in written.items() if name in KINDS}
    assert len(documents) == (3 if "--max-replicas 3" in words else 4)
    for name, document in documents.items():
        assert document["kind"] == KINDS[name]
        kubernetes_schemas.check(document)
    assert set(written["kustomization.yaml"]["resources"]) == set(documents)


def get_field(document: Any, *path: Any) -> Any:
    for step in path:
        document = document[step]
    return document


POD = ("spec", "template", "spec")


@pytest.mark.parametrize(
    ("file", "path", "value"),
    [
        ("deployment.yaml", ("spec", "selector"), None),
        ("deployment.yaml", (*POD, "containers", 0, "ports", 0, "containerPort"), "8000"),
        ("deployment.yaml", (*POD, "containers", 0, "readynessProbe"), {}),
        ("deployment.yaml", (*POD, "terminationGracePeriodSeconds"), "a while"),
        ("service.yaml", ("spec", "ports", 0, "port"), "http"),
        ("disruption.yaml", ("spec", "minAvailible"), 1),
        ("autoscaler.yaml", ("spec", "maxReplicas"), None),
        ("autoscaler.yaml", ("spec", "metrics", 0, "pods", "target", "averageValue"), [1]),
    ],
)
def test_schemas_reject_an_invalid_manifest(deploy: Any, file: str, path: tuple[Any, ...], value: Any) -> None:
    """One defect at a time; this shows that the test above can fail."""
    document = copy.deepcopy(deploy()[file])
    if value is None:
        del get_field(document, *path[:-1])[path[-1]]
    else:
        get_field(document, *path[:-1])[path[-1]] = value
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_schemas.check(document)


# --- the contents of the manifests


def test_resources_are_derived_from_the_benchmark(deploy: Any) -> None:
    """Two cores as in the benchmark, for up to two sessions of 300 MiB each, and 512 MiB of request bodies."""
    resources = {"cpu": "2", "memory": "1152Mi"}
    assert container(deploy())["resources"] == {"requests": resources, "limits": resources}
    fewer = container(deploy("--threads", "4"))["resources"]["limits"]
    assert fewer == {"cpu": "4", "memory": "832Mi"}
    more = deploy("--threads", "2", "--instances", "3")
    assert container(more)["resources"]["limits"] == {"cpu": "6", "memory": "1472Mi"}
    assert environment(more)["HASTEN_INSTANCES"] == "3"
    assert environment(more)["HASTEN_THREADS"] == "2"


def test_pod_of_a_gpu_variant_requests_a_gpu(
    deploy: Any, write_bundle: Any, make_manifest: Any, report: Report, model: Bundle
) -> None:
    name = "onnxruntime-fp16@cuda"
    assert "tolerations" not in get_field(deploy()["deployment.yaml"], *POD)
    write_bundle(model.path, make_manifest(name), measured=kubernetes_schemas.measured(report, name))
    written = deploy("--volume-claim", "bundles")
    kubernetes_schemas.check(written["deployment.yaml"])
    assert container(written)["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert "nvidia.com/gpu" not in container(written)["resources"]["requests"]
    (tolerated,) = get_field(written["deployment.yaml"], *POD, "tolerations")
    assert tolerated == {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    # The image for CPUs could not run it.
    assert container(written)["image"] == f"hasten:{__version__}-gpu"
    assert environment(written)["HASTEN_VARIANT"] == name
    assert environment(written)["TRITON_CACHE_DIR"].startswith("/var/cache/hasten/")
    # More cores do not raise the throughput.
    target = ("spec", "metrics", 0, "pods", "target", "averageValue")
    assert get_field(deploy("--threads", "8")["autoscaler.yaml"], *target) == "10"


def test_readme_describes_the_image_and_size_of_a_gpu_pod(
    write_bundle: Any, make_manifest: Any, report: Report, model: Bundle, tmp_path: Path, capsys: Any
) -> None:
    name = "fused-fp16@cuda"
    write_bundle(model.path, make_manifest(name), measured=kubernetes_schemas.measured(report, name))
    words = ["deploy", "kubernetes", str(model.path), "-o", str(tmp_path / "out")]
    assert main(words) == 0
    assert f"each pod runs {name} on 1 GPU, 2 cores and" in capsys.readouterr().out
    assert f"ARG BASE=hasten:{__version__}-gpu\n" in (tmp_path / "out" / "Dockerfile").read_text()
    readme = (tmp_path / "out" / "README.md").read_text()
    assert "make image GPU=1" in readme
    assert "sequences/s that the benchmark measured on a GPU" in readme
    assert "TensorRT" not in readme
    assert main([*words, "--gpu", "2", "--force"]) == 2
    assert "--gpu 2 is not supported: a server uses one GPU" in capsys.readouterr().err
    engine = "tensorrt-fp16@cuda"
    write_bundle(model.path, make_manifest(engine), measured=kubernetes_schemas.measured(report, engine))
    assert main([*words, "--force"]) == 0
    assert "TensorRT is not on PyPI: install it in that image" in (tmp_path / "out" / "README.md").read_text()


def test_server_parses_the_environment_of_its_pod(deploy: Any) -> None:
    written = deploy("--threads", "1", "--instances", "2", "--drain-timeout", "45s")
    values = environment(written)
    assert "HASTEN_API_KEYS" not in values
    settings = Settings.read({"bundles": container(written)["args"]}, values)
    assert (settings.host, settings.port, settings.grpc_port) == ("0.0.0.0", 8000, 8001)
    assert (settings.variant, settings.threads, settings.instances, settings.drain_timeout) == (INT8, 1, 2, 45.0)
    assert settings.bundles == ("/models/sst2",)
    ports = {port["name"]: port["containerPort"] for port in container(written)["ports"]}
    assert ports == {"http": settings.port, "grpc": settings.grpc_port}


def test_grace_period_covers_the_drain_timeout(deploy: Any) -> None:
    pod = get_field(deploy("--drain-timeout", "45s")["deployment.yaml"], *POD)
    linger_s = pod["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] > linger_s + 45
    assert pod["enableServiceLinks"] is False


def test_root_file_system_is_read_only(deploy: Any) -> None:
    written = deploy()
    context = container(written)["securityContext"]
    assert context["runAsNonRoot"] is True
    assert context["readOnlyRootFilesystem"] is True
    assert context["capabilities"] == {"drop": ["ALL"]}
    mounted = {mount["mountPath"] for mount in container(written)["volumeMounts"]}
    assert mounted == {environment(written)["HASTEN_CACHE"], "/tmp"}


def test_autoscaler_targets_the_queue_size(deploy: Any) -> None:
    written = deploy("--replicas", "4", "--max-replicas", "40", "--target-wait", "100ms")
    spec = written["autoscaler.yaml"]["spec"]
    assert (spec["minReplicas"], spec["maxReplicas"]) == (4, 40)
    assert spec["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "Deployment", "name": "sst2"}
    metric = spec["metrics"][0]["pods"]
    # At 200 rows/s, twenty rows take 100 ms.
    assert metric["target"] == {"type": "AverageValue", "averageValue": "20"}
    rule = written["prometheus-adapter.yaml"]["rules"]["custom"][0]
    assert rule["name"]["as"] == metric["metric"]["name"]
    # The autoscaler sets the number: applying a Deployment with another one would undo it.
    assert "replicas" not in written["deployment.yaml"]["spec"]


def test_fixed_number_of_pods_has_no_autoscaler(deploy: Any) -> None:
    written = deploy("--replicas", "3", "--max-replicas", "3")
    assert not {"autoscaler.yaml", "prometheus-adapter.yaml"} & set(written)
    assert written["deployment.yaml"]["spec"]["replicas"] == 3


def test_api_keys_are_read_from_a_secret(deploy: Any) -> None:
    variables = container(deploy("--keys-secret", "team.keys"))["env"]
    assert variables[-1] == {
        "name": "HASTEN_API_KEYS",
        "valueFrom": {"secretKeyRef": {"name": "team.keys", "key": "api-keys"}},
    }


def test_bundle_is_copied_into_the_image(deploy: Any, model: Bundle, tmp_path: Path) -> None:
    image = container(deploy())["image"]
    assert image == f"hasten-sst2:{model.manifest.digest[:12]}"
    lines = (tmp_path / "k8s" / "Dockerfile").read_text().splitlines()
    assert "FROM ${BASE}" in lines
    assert "COPY --chown=10001:10001 . /models/sst2" in lines


def test_bundle_is_mounted_from_a_volume_claim(deploy: Any, tmp_path: Path) -> None:
    written = deploy("--volume-claim", "models")
    volume = get_field(written["deployment.yaml"], *POD)["volumes"][0]
    assert volume["persistentVolumeClaim"] == {"claimName": "models", "readOnly": True}
    mount = container(written)["volumeMounts"][0]
    assert (mount["name"], mount["mountPath"], mount["readOnly"]) == (volume["name"], "/models", True)
    assert not (tmp_path / "k8s" / "Dockerfile").exists()


def test_new_bundle_changes_the_pod_template(
    deploy: Any, write_bundle: Any, make_manifest: Any, report: Report, model: Bundle
) -> None:
    def template(*words: str) -> Any:
        return deploy("--volume-claim", "models", *words)["deployment.yaml"]["spec"]["template"]["metadata"]

    before = template()
    assert template() == before
    newer = make_manifest(created="2026-02-03T04:05:06+00:00")
    write_bundle(model.path, newer, measured=kubernetes_schemas.measured(report, INT8, FP32))
    assert template() != before


def test_nodes_with_the_required_instructions_are_preferred(
    deploy: Any, write_bundle: Any, make_manifest: Any, report: Report, model: Bundle
) -> None:
    manifest = make_manifest()
    entry = replace(manifest.variants[0], instructions=("amx_int8", "avx512_vnni"))
    changed = replace(manifest, variants=(entry, *manifest.variants[1:]))
    write_bundle(model.path, changed, measured=kubernetes_schemas.measured(report, INT8, FP32))
    written = deploy()
    kubernetes_schemas.check(written["deployment.yaml"])
    affinity = get_field(written["deployment.yaml"], *POD, "affinity", "nodeAffinity")
    preferred = affinity["preferredDuringSchedulingIgnoredDuringExecution"]
    keys = [term["preference"]["matchExpressions"][0]["key"] for term in preferred]
    assert [key.rsplit(".", 1)[1] for key in keys] == ["AMXINT8", "AVX512VNNI"]


def test_yaml_is_readable(deploy: Any, tmp_path: Path) -> None:
    """Fields are in the usual order, and there are no aliases."""
    deploy()
    text = (tmp_path / "k8s" / "deployment.yaml").read_text()
    assert text.startswith("apiVersion: apps/v1\nkind: Deployment\nmetadata:\n  name: sst2\n")
    assert "&id" not in text
    assert yaml.safe_load(text)["metadata"]["name"] == "sst2"


def test_command_prints_the_next_step_and_the_size(
    model: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["deploy", "kubernetes", str(model.path), "-o", str(tmp_path / "k8s")]
    assert main(words) == 0
    output = capsys.readouterr().out
    assert f"kubectl apply -k {tmp_path / 'k8s'}" in output
    assert main([*words, "--force", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["variant"], document["cores"], document["memory_bytes"]) == (
        INT8,
        2,
        1152 * kubernetes_schemas.MEBIBYTE,
    )
    assert set(document["files"]) <= {file.name for file in (tmp_path / "k8s").iterdir()}


# --- invalid options


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--name My_Model", "not a valid name"),
        ("--name 8bit", "not a valid name"),
        (f"--name {'a' * 64}", "not a valid name"),
        ("--namespace Search", "not a valid name"),
        ("--image 'no image'", "not a valid name of an image"),
        ("--image Team/sst2:1", "not a valid name of an image"),
        ("--image sst2@sha256:1234", "not a valid name of an image"),
        ("--keys-secret a_b", "not a valid name"),
        ("--volume-claim -x-", "expected one argument"),
        ("--volume-claim A", "not a valid name"),
        ("--variant onnxruntime-int4", "has no variant"),
        ("--gpu 1", "runs on the CPU"),
        ("--replicas 0", "less than 1"),
        ("--threads 0", "less than 1"),
        ("--replicas 5 --max-replicas 4", "less than --replicas"),
        ("--drain-timeout soon", "not a duration"),
    ],
)
def test_invalid_option_is_a_one_line_error_and_writes_nothing(
    model: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    before = sorted(tmp_path.iterdir())
    command = ["deploy", "kubernetes", str(model.path), "-o", str(tmp_path / "k8s"), *shlex.split(words)]
    if message == "expected one argument":
        with pytest.raises(SystemExit) as exit_info:
            main(command)
        assert exit_info.value.code == 2
    else:
        assert main(command) == 2
    first, *hints = capsys.readouterr().err.splitlines()
    assert first.startswith("error: ")
    assert message in first
    assert len(hints) <= 1
    assert sorted(tmp_path.iterdir()) == before


def test_other_files_are_not_replaced(model: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "k8s"
    words = ["deploy", "kubernetes", str(model.path), "-o", str(target)]
    target.mkdir()
    (target / "mine.txt").write_text("mine")
    assert main([*words, "--force"]) == 2
    assert [file.name for file in target.iterdir()] == ["mine.txt"]
    (target / "mine.txt").unlink()
    assert main(words) == 0
    assert main(words) == 2
    assert "--force" in capsys.readouterr().err
    assert main([*words, "--force"]) == 0


def test_bundle_without_a_benchmark_is_rejected(
    bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["deploy", "kubernetes", str(bundle.path), "-o", str(tmp_path / "k8s")]) == 2
    assert "no benchmark" in capsys.readouterr().err
    assert not (tmp_path / "k8s").exists()


def test_missing_library_is_named(
    model: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert main(["deploy", "kubernetes", str(model.path), "-o", str(tmp_path / "k8s")]) == 3
    assert "hasten[deploy]" in capsys.readouterr().err
    assert not (tmp_path / "k8s").exists()
