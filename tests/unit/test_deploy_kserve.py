from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("kubernetes_validate", reason="manifests are held against Kubernetes' schemas")

import kubernetes_validate

import manifests
from hasten.bundle import Bundle
from hasten.cli import main
from hasten.core.report import Report
from hasten.server.settings import Settings
from manifests import FP32, INT8

# What an InferenceService says about a model and a pod beside what Kubernetes knows.
OF_MODELS = ("modelFormat", "runtime", "protocolVersion", "storageUri")
OF_PREDICTORS = ("minReplicas", "maxReplicas", "scaleMetric", "scaleTarget", "autoScaling", "annotations", "model")


@pytest.fixture
def model(tmp_path: Path, write_bundle: Callable[..., Bundle], report: Report) -> Bundle:
    return write_bundle(tmp_path / "sst2", measured=manifests.measured(report, INT8, FP32))


@pytest.fixture
def deploy(model: Bundle, tmp_path: Path) -> Callable[..., Any]:
    return manifests.deployer("kserve", model, tmp_path / "kserve")


def predictor(written: Any) -> Any:
    return written["inferenceservice.yaml"]["spec"]["predictor"]


def runtime(written: Any) -> Any:
    return written["servingruntime.yaml"]["spec"]


def merged(written: Any) -> dict[str, Any]:
    """The pod that KServe makes of both: its container is the runtime's with what the model says."""
    spec = {name: value for name, value in predictor(written).items() if name not in OF_PREDICTORS}
    said = {name: value for name, value in predictor(written)["model"].items() if name not in OF_MODELS}
    if "servingruntime.yaml" not in written:
        return {**spec, "containers": [{"name": "kserve-container", "image": "tritonserver", **said}]}
    container = runtime(written)["containers"][0]
    env = [*container["env"], *said.pop("env")]
    return {**spec, "containers": [{**container, **said, "env": env}], "volumes": runtime(written)["volumes"]}


STORED = "--storage s3://models/search"
WAYS = [
    "",
    STORED,
    f"{STORED} --protocol grpc-v2 --cluster-wide --namespace search --keys-secret keys",
    f"{STORED} --mode knative --protocol grpc-v2",
    "--mode knative --threads 1 --instances 2",
    "--prometheus http://prometheus.monitoring:9090 --namespace search",
    f"--runtime tritonserver {STORED} --image tritonserver-tokenizers:1",
    f"--runtime tritonserver {STORED} --protocol grpc-v2",
]


@pytest.mark.parametrize("words", WAYS)
def test_the_pods_keep_the_published_schemas(deploy: Any, words: str) -> None:
    manifests.check(manifests.as_pod(merged(deploy(*shlex.split(words)))))


@pytest.mark.parametrize("words", WAYS)
def test_the_schemas_refuse_what_is_broken(deploy: Any, words: str) -> None:
    pod = merged(deploy(*shlex.split(words)))
    pod["containers"][0]["resources"]["limit"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        manifests.check(manifests.as_pod(pod))


@pytest.mark.parametrize("words", WAYS)
def test_the_service_finds_its_runtime(deploy: Any, words: str) -> None:
    written = deploy(*shlex.split(words))
    listed = written["kustomization.yaml"]["resources"]
    assert listed[-1] == "inferenceservice.yaml"
    asked = predictor(written)["model"]
    if "tritonserver" in words:
        assert listed == ["inferenceservice.yaml"]
        assert (asked["runtime"], asked["modelFormat"]) == ("kserve-tritonserver", {"name": "triton"})
        return
    found = written["servingruntime.yaml"]
    assert asked["runtime"] == found["metadata"]["name"]
    assert asked["protocolVersion"] in found["spec"]["protocolVersions"]
    formats = [{name: one[name] for name in ("name", "version")} for one in found["spec"]["supportedModelFormats"]]
    assert asked["modelFormat"] in formats
    is_for_cluster = "--cluster-wide" in words
    assert found["kind"] == ("ClusterServingRuntime" if is_for_cluster else "ServingRuntime")
    namespace = "search" if "--namespace" in words else None
    assert written["inferenceservice.yaml"]["metadata"].get("namespace") == namespace
    assert found["metadata"].get("namespace") == (None if is_for_cluster else namespace)


def test_the_server_understands_its_environment(deploy: Any) -> None:
    container = merged(deploy(*shlex.split(STORED)))["containers"][0]
    values = {one["name"]: one["value"] for one in container["env"]}
    settings = Settings.read({"bundles": container["args"]}, values)
    assert (settings.port, settings.grpc_port, settings.variant) == (8080, 9000, INT8)
    assert container["securityContext"]["runAsNonRoot"] is True
    # A directory of bundles: the model goes by the folder in it.
    assert settings.bundles == ("/mnt/models",)
    assert container["ports"] == [{"containerPort": settings.port}]
    by_grpc = merged(deploy(*shlex.split(STORED), "--protocol", "grpc-v2"))["containers"][0]
    assert by_grpc["ports"] == [{"name": "h2c", "containerPort": settings.grpc_port}]


def test_an_image_with_the_bundle_is_its_own_runtime(deploy: Any, model: Bundle, tmp_path: Path) -> None:
    written = deploy()
    container = runtime(written)["containers"][0]
    assert container["image"] == f"hasten-sst2:{model.manifest.digest[:12]}"
    assert runtime(written)["supportedModelFormats"][0]["autoSelect"] is False
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    # What the image serves is said in its Dockerfile.
    assert "args" not in container
    assert "storageUri" not in predictor(written)["model"]
    assert 'CMD ["/models/sst2"]' in (tmp_path / "kserve" / "Dockerfile").read_text()


def test_knative_is_told_nothing_that_it_refuses(deploy: Any) -> None:
    written = deploy("--mode", "knative")
    refused = {"terminationGracePeriodSeconds", "topologySpreadConstraints", "affinity"}
    assert not refused & set(predictor(written))
    assert not {"lifecycle", "startupProbe"} & set(predictor(written)["model"])
    assert len(predictor(written)["model"]["ports"]) == 1
    annotations = written["inferenceservice.yaml"]["metadata"]["annotations"]
    assert annotations == {"serving.kserve.io/deploymentMode": "Knative"}


def test_tritonserver_has_room_for_its_tensors(deploy: Any) -> None:
    pod = merged(deploy("--runtime", "tritonserver", *shlex.split(STORED), "--threads", "4"))
    (volume,) = pod["volumes"]
    assert volume["emptyDir"] == {"medium": "Memory"}
    assert pod["containers"][0]["volumeMounts"] == [{"name": volume["name"], "mountPath": "/dev/shm"}]
    assert pod["containers"][0]["resources"]["limits"]["cpu"] == "4"


def test_pods_are_added_by_the_queue_where_there_is_a_prometheus(deploy: Any) -> None:
    written = deploy("--prometheus", "http://prometheus:9090", "--namespace", "search")
    annotations = written["inferenceservice.yaml"]["metadata"]["annotations"]
    assert annotations["serving.kserve.io/autoscalerClass"] == "keda"
    (metric,) = predictor(written)["autoScaling"]["metrics"]
    assert (
        metric["external"]["metric"]["query"]
        == 'sum(avg_over_time(hasten_waiting{model="sst2",namespace="search"}[1m]))'
    )
    # 200 sentences a second: ten of them take 50 ms.
    assert metric["external"]["target"] == {"type": "Value", "value": "10"}
    assert "scaleMetric" not in predictor(written)
    assert predictor(deploy())["scaleMetric"] == "cpu"
    assert predictor(deploy("--mode", "knative"))["scaleTarget"] == 12


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--name Sst2", "not a name"),
        (f"--name {'a' * 48}", "not a name"),
        ("--storage models", "not an address"),
        ("--runtime tritonserver", "storage address"),
        (f"--runtime tritonserver {STORED} --keys-secret keys", "--keys-secret"),
        (f"--runtime tritonserver {STORED} --cluster-wide", "--cluster-wide"),
        ("--mode knative --prometheus http://prometheus:9090", "standard mode"),
        ("--image 'no image'", "not the name of an image"),
        ("--variant onnxruntime-int4", "holds no variant"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(
    model: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str, said: str
) -> None:
    before = sorted(tmp_path.iterdir())
    assert main(["deploy", "kserve", str(model.path), "-o", str(tmp_path / "kserve"), *shlex.split(words)]) == 2
    first, *hints = capsys.readouterr().err.splitlines()
    assert first.startswith("error: ")
    assert said in first
    assert len(hints) <= 1
    assert sorted(tmp_path.iterdir()) == before


def test_tritonserver_is_sized_for_what_it_runs(
    write_bundle: Any, make_manifest: Any, report: Report, model: Bundle, tmp_path: Path, capsys: Any
) -> None:
    """Not for the fastest, which its own backends do not run."""
    fastest = "openvino-bf16"
    write_bundle(model.path, make_manifest(fastest, FP32), measured=manifests.measured(report, fastest, FP32))
    words = ["deploy", "kserve", str(model.path), "-o", str(tmp_path / "out"), "--force"]
    by_tritonserver = ["--runtime", "tritonserver", *shlex.split(STORED)]
    for given, variant in (([], fastest), (by_tritonserver, FP32), ([*by_tritonserver, "--variant", fastest], fastest)):
        assert main([*words, *given]) == 0
        assert f"each pod runs {variant} on" in capsys.readouterr().out


HALF = "onnxruntime-fp16@cuda"


@pytest.fixture
def on_gpu(write_bundle: Any, make_manifest: Any, report: Report, model: Bundle) -> Bundle:
    """Of what is in it tritonserver's own backends run the second."""
    names = ("fused-fp16@cuda", HALF)
    return write_bundle(model.path, make_manifest(*names), measured=manifests.measured(report, *names))


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("words", WAYS)
def test_a_gpu_is_asked_for(deploy: Any, words: str, tmp_path: Path) -> None:
    written = deploy(*shlex.split(words))
    pod = merged(written)
    manifests.check(manifests.as_pod(pod))
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"
    # Knative refuses them.
    assert ("tolerations" in pod) == ("knative" not in words)
    assert ("pods tolerate the taint" in (tmp_path / "kserve" / "README.md").read_text()) == (
        "tolerations" in pod and "tritonserver" not in words
    )
    if "servingruntime.yaml" in written and STORED in words:
        assert written["servingruntime.yaml"]["metadata"]["name"] == predictor(written)["model"]["runtime"]
        assert predictor(written)["model"]["runtime"] == "hasten-gpu"
        assert pod["containers"][0]["image"].endswith("-gpu")


def test_what_runs_on_a_gpu_at_once_are_batches(on_gpu: Bundle, deploy: Any) -> None:
    timed = on_gpu.report.bench.timings[0].shape.batch
    # Ten that wait, and a batch for each of two sessions.
    assert predictor(deploy("--mode", "knative"))["scaleTarget"] == 10 + 2 * timed


def test_tritonserver_on_gpus_is_sized_for_what_it_runs_there(
    on_gpu: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["deploy", "kserve", str(on_gpu.path), "-o", str(tmp_path / "out"), "--force", "--gpu", "2"]
    assert main([*words, "--runtime", "tritonserver", *shlex.split(STORED)]) == 0
    assert f"each pod runs {HALF} on 2 GPUs, 2 cores and" in capsys.readouterr().out
    assert "The CPU says little about how busy a GPU is" in (tmp_path / "out" / "README.md").read_text()
    assert main(words) == 2
    assert "--gpu 2: a server computes on one GPU" in capsys.readouterr().err
