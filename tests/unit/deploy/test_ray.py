"""The configuration of Ray Serve and the model that a request names; these tests need no Ray."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from hasten.bundle import Bundle, Manifest
from hasten.cli import main
from hasten.core.errors import BundleError, PlanError
from hasten.core.report import Bench, Interval, Report, Timing
from hasten.core.system.hardware import Gpu, this_machine, usable_cores
from hasten.core.tensors import Shape
from hasten.deploy.ray.config import full_batch, serve_config, write
from hasten.deploy.ray.replica import requested_model
from hasten.deploy.ray.run import other_applications
from hasten.server.app import PROTOCOLS
from hasten.server.http.exchange import Exchange
from hasten.server.protocols.routes import Router
from hasten.server.settings import Replicas, Settings


def settings(*bundles: Bundle, **fields: Any) -> Settings:
    return Settings(bundles=tuple(str(bundle.path) for bundle in bundles), runner="ray", **fields)


def parts(document: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the application and its deployment."""
    (application,) = document["applications"]
    (deployment,) = application["deployments"]
    return application, deployment


def test_fixed_number_of_replicas_reserves_their_cores(bundle: Bundle) -> None:
    document = serve_config(settings(bundle, replicas=Replicas(2, 2), threads=3, instances=2, max_queue=70))
    application, deployment = parts(document)
    assert deployment["num_replicas"] == 2
    assert "autoscaling_config" not in deployment
    assert deployment["ray_actor_options"] == {"num_cpus": 6}
    assert deployment["max_ongoing_requests"] == 70
    assert deployment["user_config"] == {"bundles": {"bundle": bundle.manifest.digest}}
    assert application["args"] == {"bundles": [str(bundle.path)], "threads": 3, "instances": 2, "max_queue": 70}


def test_replicas_get_all_settings_except_those_of_ray(bundle: Bundle, tmp_path: Path) -> None:
    """Settings that differ from the defaults survive YAML; those of Ray itself are left out."""
    (tmp_path / "keys").write_text("key\n")
    original = settings(
        bundle,
        threads=1,
        instances=1,
        api_key_file=tmp_path / "keys",
        max_body=2**20,
        timeout=2.5,
        max_slowdown=3.0,
        log_format="json",
        log_requests=False,
        max_models=2,
    )
    application, _ = parts(serve_config(replace(original, port=9000, reload_interval=5.0, replicas=Replicas(1, 8))))
    arguments = yaml.safe_load(yaml.safe_dump(application["args"]))
    assert replace(Settings.read(arguments, {}), runner="ray") == original


def test_replicas_share_the_cores(bundle: Bundle) -> None:
    cores = usable_cores()
    for replicas, threads in ((Replicas(1, 1), cores), (Replicas(cores, cores), 1), (Replicas(1, None), 1)):
        application, deployment = parts(serve_config(settings(bundle, replicas=replicas)))
        assert application["args"]["threads"] == deployment["ray_actor_options"]["num_cpus"] == threads


def test_range_of_replicas_is_autoscaled(bundle: Bundle) -> None:
    _, deployment = parts(serve_config(settings(bundle, replicas=Replicas(1, 8), instances=3, threads=1)))
    # Without a benchmark: one request runs in each session, and one waits.
    expected = {"min_replicas": 1, "max_replicas": 8, "target_ongoing_requests": 6}
    assert deployment["autoscaling_config"] == expected
    assert "num_replicas" not in deployment
    auto = settings(bundle, replicas=Replicas(1, None))
    assert parts(serve_config(auto))[1]["autoscaling_config"]["max_replicas"] == usable_cores()
    assert parts(serve_config(replace(auto, address="auto")))[1]["autoscaling_config"]["max_replicas"] == 100


@pytest.fixture
def on_gpu(tmp_path: Path, write_bundle: Callable[..., Bundle], make_manifest: Callable[..., Manifest]) -> Bundle:
    return write_bundle(tmp_path / "fast", make_manifest("fused-fp16@cuda", "onnxruntime-fp32"))


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = replace(this_machine(), gpus=(Gpu("NVIDIA H200", 2**37, "9.0", "580.0"),) * 2)
    monkeypatch.setattr("hasten.deploy.ray.config.this_machine", lambda: machine)


def requested_gpus(settings: Settings) -> float | None:
    """Return the share of a GPU that each replica requests; without one, Ray hides all GPUs."""
    return parts(serve_config(settings))[1]["ray_actor_options"].get("num_gpus")


@pytest.mark.usefixtures("two_gpus")
def test_replica_requests_a_gpu_or_a_share(on_gpu: Bundle, bundle: Bundle) -> None:
    assert requested_gpus(settings(on_gpu)) == 1
    assert requested_gpus(settings(on_gpu, gpus=0.25)) == 0.25
    assert requested_gpus(settings(on_gpu, variant="onnxruntime-fp32")) is None
    # One bundle that needs a GPU suffices.
    assert requested_gpus(settings(bundle, on_gpu)) == 1
    with pytest.raises(PlanError, match="--gpus is not supported: onnxruntime-fp32 runs on the CPU"):
        serve_config(settings(on_gpu, variant="onnxruntime-fp32", gpus=0.5))


def test_no_gpu_is_requested_on_a_machine_without_one(on_gpu: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bundle's graph is served instead; a cluster may have GPUs."""
    monkeypatch.setattr("hasten.deploy.ray.config.this_machine", lambda: replace(this_machine(), gpus=()))
    assert requested_gpus(settings(on_gpu)) is None
    assert requested_gpus(settings(on_gpu, address="auto")) == 1
    assert requested_gpus(settings(on_gpu, write_config=Path("fleet.yaml"))) == 1


@pytest.mark.usefixtures("two_gpus")
def test_max_replicas_follows_from_the_shares_of_gpus(on_gpu: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hasten.deploy.ray.config.usable_cores", lambda: 16)
    max_replicas = {
        gpus: parts(serve_config(settings(on_gpu, replicas=Replicas(1, None), gpus=gpus)))[1]["autoscaling_config"][
            "max_replicas"
        ]
        for gpus in (1.0, 0.6, 0.25, 0.01)
    }
    # A share is of a single GPU: two remainders of 0.4 do not hold a third replica.
    assert max_replicas == {1.0: 2, 0.6: 2, 0.25: 8, 0.01: 16}


def test_full_batch_is_the_smallest_with_nearly_the_best_throughput(
    tmp_path: Path, write_bundle: Callable[..., Bundle], report: Report
) -> None:
    length = report.plan.shapes.optimal.sequence
    rates = {(1, length): 50.0, (8, length): 95.0, (32, length): 100.0, (2, length + 1): 900.0}
    timings = tuple(timing("onnxruntime-int8", Shape(*shape), rate) for shape, rate in rates.items())
    other = timing("onnxruntime-fp32", Shape(4, length), 20.0)
    measured = replace(report, bench=Bench("torch-fp32", (*timings, other), ()))
    bundle = write_bundle(tmp_path / "measured", measured=measured)
    assert full_batch(bundle, None) == 8
    assert full_batch(bundle, "onnxruntime-fp32") == 4


def timing(variant: str, shape: Shape, rate: float) -> Timing:
    return Timing(variant, shape, 1, 1.0, 1.0, None, rate, Interval(1.0, 1.0, 1.0), (1.0,))


def test_rebuilt_bundle_changes_only_its_hash(
    tmp_path: Path, write_bundle: Callable[..., Bundle], make_manifest: Callable[..., Manifest]
) -> None:
    """Replicas restart if their arguments change, and reload the bundle if only its hash does."""
    original = settings(write_bundle(tmp_path / "one"))
    before, same = serve_config(original), serve_config(original)
    write_bundle(tmp_path / "one", make_manifest(created="2026-02-03T04:05:06+00:00"))
    after = serve_config(original)
    assert before == same
    assert parts(before)[0]["args"] == parts(after)[0]["args"]
    assert parts(before)[1].pop("user_config") != parts(after)[1].pop("user_config")
    assert parts(before)[1] == parts(after)[1]


def test_links_to_bundles_are_not_resolved(bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "current").symlink_to(bundle.path)
    monkeypatch.chdir(tmp_path)
    application, deployment = parts(serve_config(Settings(bundles=("current",), runner="ray")))
    assert application["args"]["bundles"] == [str(tmp_path / "current")]
    assert list(deployment["user_config"]["bundles"]) == ["current"]


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({"grpc_port": 9001}, "--grpc-port is not supported by Ray Serve"),
        ({"max_connections": 3}, "--max-connections is not supported"),
        ({"tls_cert": Path("cert")}, "a certificate and its key"),
        ({"api_key_file": Path("nothing")}, "there is no file /.*nothing"),
        ({"port": 0, "address": "auto"}, "--port 0 is not supported on a cluster"),
        ({"variant": "openvino-int4"}, "no variant 'openvino-int4'"),
        ({"gpus": 0.5}, "--gpus is not supported: onnxruntime-int8 runs on the CPU"),
    ],
)
def test_unsupported_settings_are_rejected(bundle: Bundle, fields: dict[str, Any], wrong: str) -> None:
    with pytest.raises(PlanError, match=wrong):
        serve_config(settings(bundle, **fields))


def test_api_keys_in_the_environment_are_rejected_for_a_cluster(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HASTEN_API_KEYS", "secret")
    assert serve_config(settings(bundle))
    with pytest.raises(PlanError, match="is not passed to a cluster"):
        serve_config(settings(bundle, address="auto"))


def test_other_applications_of_a_cluster_are_kept() -> None:
    other = {"route_prefix": "/other", "deployed_app_config": {"name": "other", "import_path": "a:b"}}
    imperative = {"route_prefix": "/imperative", "deployed_app_config": None}
    others = other_applications({"hasten": {"route_prefix": "/"}, "other": other, "imperative": imperative})
    assert others == [{"name": "other", "import_path": "a:b"}]
    with pytest.raises(PlanError, match="'default' of this cluster already has the route /"):
        other_applications({"default": {"route_prefix": "/"}})


def test_missing_bundle_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="no bundle at"):
        serve_config(Settings(bundles=(str(tmp_path / "nothing"),), runner="ray"))


def test_yaml_overwrites_only_files_of_hasten(bundle: Bundle, tmp_path: Path) -> None:
    file, document = tmp_path / "fleet.yaml", serve_config(settings(bundle, write_config=tmp_path / "fleet.yaml"))
    for _ in range(2):
        write(document, file)
        assert yaml.safe_load(file.read_text()) == document
    file.write_text("applications: []\n")
    with pytest.raises(PlanError, match="was not written by hasten"):
        write(document, file)
    assert file.read_text() == "applications: []\n"
    with pytest.raises(PlanError, match="there is no directory"):
        write(document, tmp_path / "nowhere" / "fleet.yaml")
    assert sorted(entry.name for entry in tmp_path.glob("*fleet*")) == ["fleet.yaml"]


def test_serve_command_writes_the_ray_config(
    bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hasten.server.telemetry.logs.set_up", lambda _: None)  # it would affect other tests
    file = tmp_path / "fleet.yaml"
    (bundle.path / "config.json").write_text("{}")
    words = ["serve", str(bundle.path), "--runner", "ray", "--replicas", "1-4", "--write-config", str(file)]
    assert main(words) == 0
    _, deployment = parts(yaml.safe_load(file.read_text()))
    assert deployment["autoscaling_config"]["max_replicas"] == 4
    assert main([*words, "--gpus", "0.25"]) == 2
    assert "--gpus is not supported" in capsys.readouterr().err
    assert main(["serve", str(bundle.path), "--replicas", "2"]) == 2
    assert "--replicas needs Ray Serve" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("method", "path", "body", "expected"),
    [
        ("POST", "/v2/models/some%20model/infer", b"", "some model"),
        ("GET", "/v2/models/one/versions/1/ready", b"", "one"),
        ("POST", "/models/one", b'{"inputs": "a", "model": "two"}', "one"),
        ("POST", "/predict", b'{"inputs": "a", "model": "two"}', "two"),
        ("POST", "/v1/embeddings", b'{"input": "a"}', ""),
        ("POST", "/predict", b"{", None),
        ("GET", "/info?model=one", b"", "one"),
        ("GET", "/v1/models", b"", None),
        ("GET", "/v2/health/ready", b"", None),
        ("POST", "/v2/repository/index", b"", None),
        ("POST", "/v2/repository/models/one/unload", b"", None),
        ("POST", "/rerank", b'{"query": "a", "texts": [], "model": "three"}', "three"),
        ("POST", "/nothing", b"{}", None),
    ],
)
def test_requested_model_is_read_from_path_query_or_body(
    method: str, path: str, body: bytes, expected: str | None
) -> None:
    path, _, query = path.partition("?")
    router = Router(route for routes in PROTOCOLS for route in routes)
    assert requested_model(router, Exchange(method, path, query, {}, body, lambda _: None)) == expected
