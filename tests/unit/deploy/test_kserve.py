from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("kubernetes_validate", reason="manifests are validated with Kubernetes' schemas")

import kubernetes_validate

from hasten.bundle import Bundle
from hasten.cli import main
from hasten.core.report import Report
from hasten.server.settings import Settings
from support import kubernetes_schemas
from support.kubernetes_schemas import FP32, INT8

# The fields of an InferenceService's model and predictor that are not fields of a container or a pod.
MODEL_FIELDS = ("modelFormat", "runtime", "protocolVersion", "storageUri")
PREDICTOR_FIELDS = ("minReplicas", "maxReplicas", "scaleMetric", "scaleTarget", "autoScaling", "annotations", "model")


@pytest.fixture
def model(tmp_path: Path, write_bundle: Callable[..., Bundle], report: Report) -> Bundle:
    return write_bundle(tmp_path / "sst2", measured=kubernetes_schemas.measured(report, INT8, FP32))


@pytest.fixture
def deploy(model: Bundle, tmp_path: Path) -> Callable[..., Any]:
    return kubernetes_schemas.deployer("kserve", model, tmp_path / "kserve")


def predictor(written: Any) -> Any:
    return written["inferenceservice.yaml"]["spec"]["predictor"]


def runtime(written: Any) -> Any:
    return written["servingruntime.yaml"]["spec"]


def merged(written: Any) -> dict[str, Any]:
    """Return the pod that KServe creates: the runtime's container, overridden by the model's fields."""
    spec = {name: value for name, value in predictor(written).items() if name not in PREDICTOR_FIELDS}
    fields = {name: value for name, value in predictor(written)["model"].items() if name not in MODEL_FIELDS}
    if "servingruntime.yaml" not in written:
        return {**spec, "containers": [{"name": "kserve-container", "image": "tritonserver", **fields}]}
    container = runtime(written)["containers"][0]
    env = [*container["env"], *fields.pop("env")]
    return {**spec, "containers": [{**container, **fields, "env": env}], "volumes": runtime(written)["volumes"]}


STORED = "--storage s3://models/search"
OPTIONS = [
    "",
    STORED,
    f"{STORED} --protocol grpc-v2 --cluster-wide --namespace search --keys-secret keys",
    f"{STORED} --mode knative --protocol grpc-v2",
    "--mode knative --threads 1 --instances 2",
    "--prometheus http://prometheus.monitoring:9090 --namespace search",
    f"--runtime tritonserver {STORED} --image tritonserver-tokenizers:1",
    f"--runtime tritonserver {STORED} --protocol grpc-v2",
]


@pytest.mark.parametrize("words", OPTIONS)
def test_pods_match_the_published_schemas(deploy: Any, words: str) -> None:
    kubernetes_schemas.check(kubernetes_schemas.as_pod(merged(deploy(*shlex.split(words)))))


@pytest.mark.parametrize("words", OPTIONS)
def test_schemas_reject_an_invalid_pod(deploy: Any, words: str) -> None:
    pod = merged(deploy(*shlex.split(words)))
    pod["containers"][0]["resources"]["limit"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_schemas.check(kubernetes_schemas.as_pod(pod))


@pytest.mark.parametrize("words", OPTIONS)
def test_inference_service_names_its_runtime(deploy: Any, words: str) -> None:
    written = deploy(*shlex.split(words))
    listed = written["kustomization.yaml"]["resources"]
    assert listed[-1] == "inferenceservice.yaml"
    model = predictor(written)["model"]
    if "tritonserver" in words:
        assert listed == ["inferenceservice.yaml"]
        assert (model["runtime"], model["modelFormat"]) == ("kserve-tritonserver", {"name": "triton"})
        return
    document = written["servingruntime.yaml"]
    assert model["runtime"] == document["metadata"]["name"]
    assert model["protocolVersion"] in document["spec"]["protocolVersions"]
    formats = [
        {name: entry[name] for name in ("name", "version")} for entry in document["spec"]["supportedModelFormats"]
    ]
    assert model["modelFormat"] in formats
    is_for_cluster = "--cluster-wide" in words
    assert document["kind"] == ("ClusterServingRuntime" if is_for_cluster else "ServingRuntime")
    namespace = "search" if "--namespace" in words else None
    assert written["inferenceservice.yaml"]["metadata"].get("namespace") == namespace
    assert document["metadata"].get("namespace") == (None if is_for_cluster else namespace)


def test_server_parses_the_environment_of_its_pod(deploy: Any) -> None:
    container = merged(deploy(*shlex.split(STORED)))["containers"][0]
    values = {entry["name"]: entry["value"] for entry in container["env"]}
    settings = Settings.read({"bundles": container["args"]}, values)
    assert (settings.port, settings.grpc_port, settings.variant) == (8080, 9000, INT8)
    assert container["securityContext"]["runAsNonRoot"] is True
    # A directory of bundles: a model is named like its folder.
    assert settings.bundles == ("/mnt/models",)
    assert container["ports"] == [{"containerPort": settings.port}]
    grpc_container = merged(deploy(*shlex.split(STORED), "--protocol", "grpc-v2"))["containers"][0]
    assert grpc_container["ports"] == [{"name": "h2c", "containerPort": settings.grpc_port}]


def test_image_with_the_bundle_is_its_own_runtime(deploy: Any, model: Bundle, tmp_path: Path) -> None:
    written = deploy()
    container = runtime(written)["containers"][0]
    assert container["image"] == f"hasten-sst2:{model.manifest.digest[:12]}"
    assert runtime(written)["supportedModelFormats"][0]["autoSelect"] is False
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    # The Dockerfile sets the bundle to serve.
    assert "args" not in container
    assert "storageUri" not in predictor(written)["model"]
    assert 'CMD ["/models/sst2"]' in (tmp_path / "kserve" / "Dockerfile").read_text()


def test_fields_that_knative_rejects_are_left_out(deploy: Any) -> None:
    written = deploy("--mode", "knative")
    rejected = {"terminationGracePeriodSeconds", "topologySpreadConstraints", "affinity"}
    assert not rejected & set(predictor(written))
    assert not {"lifecycle", "startupProbe"} & set(predictor(written)["model"])
    assert len(predictor(written)["model"]["ports"]) == 1
    annotations = written["inferenceservice.yaml"]["metadata"]["annotations"]
    assert annotations == {"serving.kserve.io/deploymentMode": "Knative"}


def test_tritonserver_gets_shared_memory(deploy: Any) -> None:
    pod = merged(deploy("--runtime", "tritonserver", *shlex.split(STORED), "--threads", "4"))
    (volume,) = pod["volumes"]
    assert volume["emptyDir"] == {"medium": "Memory"}
    assert pod["containers"][0]["volumeMounts"] == [{"name": volume["name"], "mountPath": "/dev/shm"}]
    assert pod["containers"][0]["resources"]["limits"]["cpu"] == "4"


def test_keda_scales_by_the_queue_with_prometheus(deploy: Any) -> None:
    written = deploy("--prometheus", "http://prometheus:9090", "--namespace", "search")
    annotations = written["inferenceservice.yaml"]["metadata"]["annotations"]
    assert annotations["serving.kserve.io/autoscalerClass"] == "keda"
    (metric,) = predictor(written)["autoScaling"]["metrics"]
    assert (
        metric["external"]["metric"]["query"]
        == 'sum(avg_over_time(hasten_queue_size{model="sst2",namespace="search"}[1m]))'
    )
    # At 200 rows/s, ten rows take 50 ms.
    assert metric["external"]["target"] == {"type": "Value", "value": "10"}
    assert "scaleMetric" not in predictor(written)
    assert predictor(deploy())["scaleMetric"] == "cpu"
    assert predictor(deploy("--mode", "knative"))["scaleTarget"] == 12


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--name Sst2", "not a valid name"),
        (f"--name {'a' * 48}", "not a valid name"),
        ("--storage models", "not an address"),
        ("--runtime tritonserver", "storage address"),
        (f"--runtime tritonserver {STORED} --keys-secret keys", "--keys-secret"),
        (f"--runtime tritonserver {STORED} --cluster-wide", "--cluster-wide"),
        ("--mode knative --prometheus http://prometheus:9090", "not supported in Knative mode"),
        ("--image 'no image'", "not a valid name of an image"),
        ("--variant onnxruntime-int4", "has no variant"),
    ],
)
def test_invalid_option_is_a_one_line_error_and_writes_nothing(
    model: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    before = sorted(tmp_path.iterdir())
    assert main(["deploy", "kserve", str(model.path), "-o", str(tmp_path / "kserve"), *shlex.split(words)]) == 2
    first, *hints = capsys.readouterr().err.splitlines()
    assert first.startswith("error: ")
    assert message in first
    assert len(hints) <= 1
    assert sorted(tmp_path.iterdir()) == before


def test_tritonserver_pod_is_sized_for_the_variant_that_it_runs(
    write_bundle: Any, make_manifest: Any, report: Report, model: Bundle, tmp_path: Path, capsys: Any
) -> None:
    """The fastest variant does not run in tritonserver's own backends."""
    fastest = "openvino-bf16"
    write_bundle(model.path, make_manifest(fastest, FP32), measured=kubernetes_schemas.measured(report, fastest, FP32))
    words = ["deploy", "kserve", str(model.path), "-o", str(tmp_path / "out"), "--force"]
    on_tritonserver = ["--runtime", "tritonserver", *shlex.split(STORED)]
    for options, variant in (
        ([], fastest),
        (on_tritonserver, FP32),
        ([*on_tritonserver, "--variant", fastest], fastest),
    ):
        assert main([*words, *options]) == 0
        assert f"each pod runs {variant} on" in capsys.readouterr().out


FP16 = "onnxruntime-fp16@cuda"


@pytest.fixture
def on_gpu(write_bundle: Any, make_manifest: Any, report: Report, model: Bundle) -> Bundle:
    """A bundle of which tritonserver's own backends run the second variant."""
    names = ("fused-fp16@cuda", FP16)
    return write_bundle(model.path, make_manifest(*names), measured=kubernetes_schemas.measured(report, *names))


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("words", OPTIONS)
def test_pod_of_a_gpu_variant_requests_a_gpu(deploy: Any, words: str, tmp_path: Path) -> None:
    written = deploy(*shlex.split(words))
    pod = merged(written)
    kubernetes_schemas.check(kubernetes_schemas.as_pod(pod))
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"
    # Knative rejects them.
    assert ("tolerations" in pod) == ("knative" not in words)
    assert ("pods tolerate the taint" in (tmp_path / "kserve" / "README.md").read_text()) == (
        "tolerations" in pod and "tritonserver" not in words
    )
    if "servingruntime.yaml" in written and STORED in words:
        assert written["servingruntime.yaml"]["metadata"]["name"] == predictor(written)["model"]["runtime"]
        assert predictor(written)["model"]["runtime"] == "hasten-gpu"
        assert pod["containers"][0]["image"].endswith("-gpu")


def test_knative_target_on_a_gpu_counts_whole_batches(on_gpu: Bundle, deploy: Any) -> None:
    batch = on_gpu.report.bench.timings[0].shape.batch
    # Ten queued requests, and a batch for each of two sessions.
    assert predictor(deploy("--mode", "knative"))["scaleTarget"] == 10 + 2 * batch


def test_tritonserver_pod_on_gpus_is_sized_for_the_variant_that_it_runs(
    on_gpu: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["deploy", "kserve", str(on_gpu.path), "-o", str(tmp_path / "out"), "--force", "--gpu", "2"]
    assert main([*words, "--runtime", "tritonserver", *shlex.split(STORED)]) == 0
    assert f"each pod runs {FP16} on 2 GPUs, 2 cores and" in capsys.readouterr().out
    assert "CPU usage does not reflect GPU usage" in (tmp_path / "out" / "README.md").read_text()
    assert main(words) == 2
    assert "--gpu 2 is not supported: a server uses one GPU" in capsys.readouterr().err
