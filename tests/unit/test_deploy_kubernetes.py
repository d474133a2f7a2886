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

pytest.importorskip("kubernetes_validate", reason="manifests are held against Kubernetes' schemas")

import kubernetes_validate
import yaml

import manifests
from hasten.bundle import Bundle
from hasten.cli import main
from hasten.core.report import Report
from hasten.core.version import __version__
from hasten.server.settings import Settings
from manifests import FP32, INT8

KINDS = {
    "deployment.yaml": "Deployment",
    "service.yaml": "Service",
    "disruption.yaml": "PodDisruptionBudget",
    "autoscaler.yaml": "HorizontalPodAutoscaler",
}


@pytest.fixture
def model(tmp_path: Path, write_bundle: Callable[..., Bundle], report: Report) -> Bundle:
    return write_bundle(tmp_path / "sst2", measured=manifests.measured(report, INT8, FP32))


@pytest.fixture
def deploy(model: Bundle, tmp_path: Path) -> Callable[..., Any]:
    return manifests.deployer("kubernetes", model, tmp_path / "k8s")


def container(written: Any) -> Any:
    return written["deployment.yaml"]["spec"]["template"]["spec"]["containers"][0]


def environment(written: Any) -> dict[str, str]:
    return {one["name"]: one["value"] for one in container(written)["env"] if "value" in one}


# --- the published schemas


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--volume-claim models --namespace search",
        "--image registry.example:5000/team/sst2:1 --keys-secret keys --drain 90s",
        "--threads 2 --instances 4 --replicas 30 --max-replicas 60",
        f"--variant {FP32} --replicas 3 --max-replicas 3",
    ],
)
def test_what_is_written_keeps_the_published_schemas(deploy: Any, words: str) -> None:
    written = deploy(*shlex.split(words))
    documents = {name: document for name, document in written.items() if name in KINDS}
    assert len(documents) == (3 if "--max-replicas 3" in words else 4)
    for name, document in documents.items():
        assert document["kind"] == KINDS[name]
        manifests.check(document)
    assert set(written["kustomization.yaml"]["resources"]) == set(documents)


def place(document: Any, *path: Any) -> Any:
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
def test_the_schemas_refuse_what_is_broken(deploy: Any, file: str, path: tuple[Any, ...], value: Any) -> None:
    """One thing at a time: without this the test above would prove nothing."""
    document = copy.deepcopy(deploy()[file])
    if value is None:
        del place(document, *path[:-1])[path[-1]]
    else:
        place(document, *path[:-1])[path[-1]] = value
    with pytest.raises(kubernetes_validate.ValidationError):
        manifests.check(document)


# --- what stands in them


def test_resources_follow_from_the_benchmark(deploy: Any) -> None:
    """Two cores as timed, on which the server may open two sessions of 300 MiB, and 512 MiB of bodies."""
    asked = {"cpu": "2", "memory": "1152Mi"}
    assert container(deploy())["resources"] == {"requests": asked, "limits": asked}
    fewer = container(deploy("--threads", "4"))["resources"]["limits"]
    assert fewer == {"cpu": "4", "memory": "832Mi"}
    more = deploy("--threads", "2", "--instances", "3")
    assert container(more)["resources"]["limits"] == {"cpu": "6", "memory": "1472Mi"}
    assert environment(more)["HASTEN_INSTANCES"] == "3"
    assert environment(more)["HASTEN_THREADS"] == "2"


def test_a_variant_for_a_gpu_gets_one(
    deploy: Any, write_bundle: Any, make_manifest: Any, report: Report, model: Bundle
) -> None:
    name = "onnxruntime-fp16@cuda"
    assert "tolerations" not in place(deploy()["deployment.yaml"], *POD)
    write_bundle(model.path, make_manifest(name), measured=manifests.measured(report, name))
    written = deploy("--volume-claim", "bundles")
    manifests.check(written["deployment.yaml"])
    assert container(written)["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert "nvidia.com/gpu" not in container(written)["resources"]["requests"]
    (tolerated,) = place(written["deployment.yaml"], *POD, "tolerations")
    assert tolerated == {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    # Another than the one for processors, in which it would not get ready.
    assert container(written)["image"] == f"hasten:{__version__}-gpu"
    assert environment(written)["HASTEN_VARIANT"] == name
    assert environment(written)["TRITON_CACHE_DIR"].startswith("/var/cache/hasten/")
    # No more sentences on more cores.
    waiting = ("spec", "metrics", 0, "pods", "target", "averageValue")
    assert place(deploy("--threads", "8")["autoscaler.yaml"], *waiting) == "10"


def test_a_gpus_image_and_size_are_told(
    write_bundle: Any, make_manifest: Any, report: Report, model: Bundle, tmp_path: Path, capsys: Any
) -> None:
    name = "fused-fp16@cuda"
    write_bundle(model.path, make_manifest(name), measured=manifests.measured(report, name))
    words = ["deploy", "kubernetes", str(model.path), "-o", str(tmp_path / "out")]
    assert main(words) == 0
    assert f"each pod runs {name} on 1 GPU, 2 cores and" in capsys.readouterr().out
    assert f"ARG BASE=hasten:{__version__}-gpu\n" in (tmp_path / "out" / "Dockerfile").read_text()
    readme = (tmp_path / "out" / "README.md").read_text()
    assert "make image GPU=1" in readme
    assert "sentences a second that the benchmark measured on a GPU" in readme
    assert "TensorRT" not in readme
    assert main([*words, "--gpu", "2", "--force"]) == 2
    assert "--gpu 2: a server computes on one GPU" in capsys.readouterr().err
    engine = "tensorrt-fp16@cuda"
    write_bundle(model.path, make_manifest(engine), measured=manifests.measured(report, engine))
    assert main([*words, "--force"]) == 0
    assert "TensorRT lies outside PyPI: put it into that image" in (tmp_path / "out" / "README.md").read_text()
    engine = "onnxruntime-tensorrt-fp16@cuda"
    write_bundle(model.path, make_manifest(engine), measured=manifests.measured(report, engine))
    assert main([*words, "--force"]) == 2
    assert "builds its engine where it is first opened, and every pod would" in capsys.readouterr().err


def test_the_server_understands_its_environment(deploy: Any) -> None:
    written = deploy("--threads", "1", "--instances", "2", "--drain", "45s")
    values = environment(written)
    assert "HASTEN_API_KEYS" not in values
    settings = Settings.read({"bundles": container(written)["args"]}, values)
    assert (settings.host, settings.port, settings.grpc_port) == ("0.0.0.0", 8000, 8001)
    assert (settings.variant, settings.threads, settings.instances, settings.drain) == (INT8, 1, 2, 45.0)
    assert settings.bundles == ("/models/sst2",)
    ports = {port["name"]: port["containerPort"] for port in container(written)["ports"]}
    assert ports == {"http": settings.port, "grpc": settings.grpc_port}


def test_a_pod_has_the_time_to_answer_what_it_took(deploy: Any) -> None:
    pod = place(deploy("--drain", "45s")["deployment.yaml"], *POD)
    lingers = pod["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] > lingers + 45
    assert pod["enableServiceLinks"] is False


def test_it_may_write_nowhere_but_where_it_must(deploy: Any) -> None:
    written = deploy()
    allowed = container(written)["securityContext"]
    assert allowed["runAsNonRoot"] is True
    assert allowed["readOnlyRootFilesystem"] is True
    assert allowed["capabilities"] == {"drop": ["ALL"]}
    mounted = {one["mountPath"] for one in container(written)["volumeMounts"]}
    assert mounted == {environment(written)["HASTEN_CACHE"], "/tmp"}


def test_pods_are_added_where_requests_wait(deploy: Any) -> None:
    written = deploy("--replicas", "4", "--max-replicas", "40", "--target-wait", "100ms")
    spec = written["autoscaler.yaml"]["spec"]
    assert (spec["minReplicas"], spec["maxReplicas"]) == (4, 40)
    assert spec["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "Deployment", "name": "sst2"}
    metric = spec["metrics"][0]["pods"]
    # 200 sentences a second: twenty of them take a tenth of one.
    assert metric["target"] == {"type": "AverageValue", "averageValue": "20"}
    rule = written["prometheus-adapter.yaml"]["rules"]["custom"][0]
    assert rule["name"]["as"] == metric["metric"]["name"]
    # The autoscaler's own number: a Deployment that says another one would undo it whenever it is applied.
    assert "replicas" not in written["deployment.yaml"]["spec"]


def test_a_fixed_number_needs_no_autoscaler(deploy: Any) -> None:
    written = deploy("--replicas", "3", "--max-replicas", "3")
    assert not {"autoscaler.yaml", "prometheus-adapter.yaml"} & set(written)
    assert written["deployment.yaml"]["spec"]["replicas"] == 3


def test_keys_come_from_a_secret(deploy: Any) -> None:
    listed = container(deploy("--keys-secret", "team.keys"))["env"]
    assert listed[-1] == {
        "name": "HASTEN_API_KEYS",
        "valueFrom": {"secretKeyRef": {"name": "team.keys", "key": "api-keys"}},
    }


def test_the_bundle_comes_in_the_image(deploy: Any, model: Bundle, tmp_path: Path) -> None:
    image = container(deploy())["image"]
    assert image == f"hasten-sst2:{model.manifest.digest[:12]}"
    lines = (tmp_path / "k8s" / "Dockerfile").read_text().splitlines()
    assert "FROM ${BASE}" in lines
    assert "COPY --chown=10001:10001 . /models/sst2" in lines


def test_the_bundle_comes_from_a_claim(deploy: Any, tmp_path: Path) -> None:
    written = deploy("--volume-claim", "models")
    volume = place(written["deployment.yaml"], *POD)["volumes"][0]
    assert volume["persistentVolumeClaim"] == {"claimName": "models", "readOnly": True}
    mount = container(written)["volumeMounts"][0]
    assert (mount["name"], mount["mountPath"], mount["readOnly"]) == (volume["name"], "/models", True)
    assert not (tmp_path / "k8s" / "Dockerfile").exists()


def test_another_bundle_replaces_the_pods(
    deploy: Any, write_bundle: Any, make_manifest: Any, report: Report, model: Bundle
) -> None:
    def template(*words: str) -> Any:
        return deploy("--volume-claim", "models", *words)["deployment.yaml"]["spec"]["template"]["metadata"]

    before = template()
    assert template() == before
    newer = make_manifest(created="2026-02-03T04:05:06+00:00")
    write_bundle(model.path, newer, measured=manifests.measured(report, INT8, FP32))
    assert template() != before


def test_nodes_with_the_instructions_go_first(
    deploy: Any, write_bundle: Any, make_manifest: Any, report: Report, model: Bundle
) -> None:
    manifest = make_manifest()
    needy = replace(manifest.variants[0], instructions=("amx_int8", "avx512_vnni"))
    changed = replace(manifest, variants=(needy, *manifest.variants[1:]))
    write_bundle(model.path, changed, measured=manifests.measured(report, INT8, FP32))
    written = deploy()
    manifests.check(written["deployment.yaml"])
    affinity = place(written["deployment.yaml"], *POD, "affinity", "nodeAffinity")
    preferred = affinity["preferredDuringSchedulingIgnoredDuringExecution"]
    keys = [one["preference"]["matchExpressions"][0]["key"] for one in preferred]
    assert [key.rsplit(".", 1)[1] for key in keys] == ["AMXINT8", "AVX512VNNI"]


def test_it_reads_well(deploy: Any, tmp_path: Path) -> None:
    """In the order people write it, everything said where it stands."""
    deploy()
    text = (tmp_path / "k8s" / "deployment.yaml").read_text()
    assert text.startswith("apiVersion: apps/v1\nkind: Deployment\nmetadata:\n  name: sst2\n")
    assert "&id" not in text
    assert yaml.safe_load(text)["metadata"]["name"] == "sst2"


def test_it_says_what_was_written(model: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["deploy", "kubernetes", str(model.path), "-o", str(tmp_path / "k8s")]
    assert main(words) == 0
    told = capsys.readouterr().out
    assert f"kubectl apply -k {tmp_path / 'k8s'}" in told
    assert main([*words, "--force", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["variant"], document["cores"], document["memory_bytes"]) == (INT8, 2, 1152 * manifests.MEBIBYTE)
    assert set(document["files"]) <= {file.name for file in (tmp_path / "k8s").iterdir()}


# --- what cannot be


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--name My_Model", "not a name"),
        ("--name 8bit", "not a name"),
        (f"--name {'a' * 64}", "not a name"),
        ("--namespace Search", "not a name"),
        ("--image 'no image'", "not the name of an image"),
        ("--image Team/sst2:1", "not the name of an image"),
        ("--image sst2@sha256:1234", "not the name of an image"),
        ("--keys-secret a_b", "not a name"),
        ("--volume-claim -x-", "expected one argument"),
        ("--volume-claim A", "not a name"),
        ("--variant onnxruntime-int4", "holds no variant"),
        ("--gpu 1", "runs on the CPU"),
        ("--replicas 0", "less than one"),
        ("--threads 0", "less than one"),
        ("--replicas 5 --max-replicas 4", "less than --replicas"),
        ("--drain soon", "not a duration"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(
    model: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str, said: str
) -> None:
    before = sorted(tmp_path.iterdir())
    command = ["deploy", "kubernetes", str(model.path), "-o", str(tmp_path / "k8s"), *shlex.split(words)]
    if said == "expected one argument":
        with pytest.raises(SystemExit) as left:
            main(command)
        assert left.value.code == 2
    else:
        assert main(command) == 2
    first, *hints = capsys.readouterr().err.splitlines()
    assert first.startswith("error: ")
    assert said in first
    assert len(hints) <= 1
    assert sorted(tmp_path.iterdir()) == before


def test_what_others_wrote_is_not_replaced(model: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_a_bundle_without_a_benchmark_is_not_guessed_at(
    bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["deploy", "kubernetes", str(bundle.path), "-o", str(tmp_path / "k8s")]) == 2
    assert "no benchmark" in capsys.readouterr().err
    assert not (tmp_path / "k8s").exists()


def test_a_missing_library_is_named(
    model: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert main(["deploy", "kubernetes", str(model.path), "-o", str(tmp_path / "k8s")]) == 3
    assert "hasten[deploy]" in capsys.readouterr().err
    assert not (tmp_path / "k8s").exists()
