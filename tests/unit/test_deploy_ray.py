"""What Ray Serve is told to run, and which model a request is about: all that needs no Ray."""

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
from hasten.core.hardware import Gpu, this_machine, usable_cores
from hasten.core.report import Bench, Report, Timing
from hasten.core.statistics import Interval
from hasten.core.tensors import Shape
from hasten.deploy.ray.config import fleet, full_batch, write
from hasten.deploy.ray.replica import asked_model
from hasten.deploy.ray.run import others
from hasten.server.app import PROTOCOLS
from hasten.server.exchange import Exchange
from hasten.server.routes import Router
from hasten.server.settings import Replicas, Settings


def settings(*bundles: Bundle, **about: Any) -> Settings:
    return Settings(bundles=tuple(str(bundle.path) for bundle in bundles), on="ray", **about)


def parts(document: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The application and its deployment."""
    (application,) = document["applications"]
    (deployment,) = application["deployments"]
    return application, deployment


def test_so_many_replicas_with_the_cores_they_use(bundle: Bundle) -> None:
    document = fleet(settings(bundle, replicas=Replicas(2, 2), threads=3, instances=2, max_queue=70))
    application, deployment = parts(document)
    assert deployment["num_replicas"] == 2
    assert "autoscaling_config" not in deployment
    assert deployment["ray_actor_options"] == {"num_cpus": 6}
    assert deployment["max_ongoing_requests"] == 70
    assert deployment["user_config"] == {"bundles": {"bundle": bundle.manifest.digest}}
    assert application["args"] == {"bundles": [str(bundle.path)], "threads": 3, "instances": 2, "max_queue": 70}


def test_replicas_get_the_settings_as_they_were_given(bundle: Bundle, tmp_path: Path) -> None:
    """Whatever differs from the defaults, through YAML and back; what is Ray's own stays out of it."""
    (tmp_path / "keys").write_text("key\n")
    given = settings(
        bundle,
        threads=1,
        instances=1,
        key_file=tmp_path / "keys",
        max_body=2**20,
        timeout=2.5,
        max_slowdown=3.0,
        log="json",
        log_requests=False,
        max_models=2,
    )
    application, _ = parts(fleet(replace(given, port=9000, watch=5.0, replicas=Replicas(1, 8))))
    arguments = yaml.safe_load(yaml.safe_dump(application["args"]))
    assert replace(Settings.read(arguments, {}), on="ray") == given


def test_the_cores_are_shared_out_among_replicas(bundle: Bundle) -> None:
    cores = usable_cores()
    for replicas, threads in ((Replicas(1, 1), cores), (Replicas(cores, cores), 1), (Replicas(1, None), 1)):
        application, deployment = parts(fleet(settings(bundle, replicas=replicas)))
        assert application["args"]["threads"] == deployment["ray_actor_options"]["num_cpus"] == threads


def test_load_decides_between_two_numbers(bundle: Bundle) -> None:
    _, deployment = parts(fleet(settings(bundle, replicas=Replicas(1, 8), instances=3, threads=1)))
    # Nothing was measured of this bundle: a request at a time in each session, and one that waits for it.
    expected = {"min_replicas": 1, "max_replicas": 8, "target_ongoing_requests": 6}
    assert deployment["autoscaling_config"] == expected
    assert "num_replicas" not in deployment
    auto = settings(bundle, replicas=Replicas(1, None))
    assert parts(fleet(auto))[1]["autoscaling_config"]["max_replicas"] == usable_cores()
    assert parts(fleet(replace(auto, address="auto")))[1]["autoscaling_config"]["max_replicas"] == 100


@pytest.fixture
def on_gpu(tmp_path: Path, write_bundle: Callable[..., Bundle], make_manifest: Callable[..., Manifest]) -> Bundle:
    return write_bundle(tmp_path / "fast", make_manifest("fused-fp16@cuda", "onnxruntime-fp32"))


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = replace(this_machine(), gpus=(Gpu("NVIDIA H200", 2**37, "9.0", "580.0"),) * 2)
    monkeypatch.setattr("hasten.deploy.ray.config.this_machine", lambda: machine)


def asked(settings: Settings) -> float | None:
    """The share of a GPU that each replica is given; what is given none sees none."""
    return parts(fleet(settings))[1]["ray_actor_options"].get("num_gpus")


@pytest.mark.usefixtures("two_gpus")
def test_a_replica_has_a_gpu_or_a_share_of_one(on_gpu: Bundle, bundle: Bundle) -> None:
    assert asked(settings(on_gpu)) == 1
    assert asked(settings(on_gpu, gpus=0.25)) == 0.25
    assert asked(settings(on_gpu, variant="onnxruntime-fp32")) is None
    # One of several is enough.
    assert asked(settings(bundle, on_gpu)) == 1
    with pytest.raises(PlanError, match="onnxruntime-fp32 runs on the CPU"):
        fleet(settings(on_gpu, variant="onnxruntime-fp32", gpus=0.5))


def test_where_there_is_no_gpu_none_is_asked_for(on_gpu: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bundle's graph answers; a cluster is another matter."""
    monkeypatch.setattr("hasten.deploy.ray.config.this_machine", lambda: replace(this_machine(), gpus=()))
    assert asked(settings(on_gpu)) is None
    assert asked(settings(on_gpu, address="auto")) == 1
    assert asked(settings(on_gpu, write=Path("fleet.yaml"))) == 1


@pytest.mark.usefixtures("two_gpus")
def test_as_many_replicas_as_gpus_are_shared_by(on_gpu: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hasten.deploy.ray.config.usable_cores", lambda: 16)
    most = {
        gpus: parts(fleet(settings(on_gpu, replicas=Replicas(1, None), gpus=gpus)))[1]["autoscaling_config"][
            "max_replicas"
        ]
        for gpus in (1.0, 0.6, 0.25, 0.01)
    }
    # A replica has its share of one: two times 0.4 that are left hold no third.
    assert most == {1.0: 2, 0.6: 2, 0.25: 8, 0.01: 16}


def test_a_batch_is_full_where_the_benchmark_gains_little_more(
    tmp_path: Path, write_bundle: Callable[..., Bundle], report: Report
) -> None:
    usual = report.plan.shapes.optimal.sequence
    rates = {(1, usual): 50.0, (8, usual): 95.0, (32, usual): 100.0, (2, usual + 1): 900.0}
    timings = tuple(timing("onnxruntime-int8", Shape(*shape), rate) for shape, rate in rates.items())
    other = timing("onnxruntime-fp32", Shape(4, usual), 20.0)
    measured = replace(report, bench=Bench("torch-fp32", (*timings, other), ()))
    bundle = write_bundle(tmp_path / "measured", measured=measured)
    assert full_batch(bundle, None) == 8
    assert full_batch(bundle, "onnxruntime-fp32") == 4


def timing(variant: str, shape: Shape, rate: float) -> Timing:
    return Timing(variant, shape, 1, 1.0, 1.0, None, rate, Interval(1.0, 1.0, 1.0), (1.0,))


def test_another_build_changes_its_hash_alone(
    tmp_path: Path, write_bundle: Callable[..., Bundle], make_manifest: Callable[..., Manifest]
) -> None:
    """Replicas whose arguments changed would be started anew; those are told of another hash."""
    given = settings(write_bundle(tmp_path / "one"))
    before, same = fleet(given), fleet(given)
    write_bundle(tmp_path / "one", make_manifest(created="2026-02-03T04:05:06+00:00"))
    after = fleet(given)
    assert before == same
    assert parts(before)[0]["args"] == parts(after)[0]["args"]
    assert parts(before)[1].pop("user_config") != parts(after)[1].pop("user_config")
    assert parts(before)[1] == parts(after)[1]


def test_links_stay_links(bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "current").symlink_to(bundle.path)
    monkeypatch.chdir(tmp_path)
    application, deployment = parts(fleet(Settings(bundles=("current",), on="ray")))
    assert application["args"]["bundles"] == [str(tmp_path / "current")]
    assert list(deployment["user_config"]["bundles"]) == ["current"]


@pytest.mark.parametrize(
    ("about", "wrong"),
    [
        ({"grpc_port": 9001}, "--grpc-port is nothing that Ray Serve can be told"),
        ({"supervise": True}, "--supervise is nothing"),
        ({"max_connections": 3}, "--max-connections is nothing"),
        ({"tls_cert": Path("cert")}, "a certificate and its key"),
        ({"key_file": Path("nothing")}, "there is no file /.*nothing"),
        ({"port": 0, "address": "auto"}, "a cluster listens where it is told"),
        ({"variant": "openvino-int4"}, "no variant 'openvino-int4'"),
        ({"gpus": 0.5}, "onnxruntime-int8 runs on the CPU: it has no use for --gpus"),
    ],
)
def test_what_cannot_be(bundle: Bundle, about: dict[str, Any], wrong: str) -> None:
    with pytest.raises(PlanError, match=wrong):
        fleet(settings(bundle, **about))


def test_keys_of_this_environment_are_not_left_behind(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HASTEN_API_KEYS", "secret")
    assert fleet(settings(bundle))
    with pytest.raises(PlanError, match="does not reach a cluster"):
        fleet(settings(bundle, address="auto"))


def test_other_applications_of_a_cluster_stay() -> None:
    other = {"route_prefix": "/other", "deployed_app_config": {"name": "other", "import_path": "a:b"}}
    by_hand = {"route_prefix": "/by-hand", "deployed_app_config": None}
    found = others({"hasten": {"route_prefix": "/"}, "other": other, "by-hand": by_hand})
    assert found == [{"name": "other", "import_path": "a:b"}]
    with pytest.raises(PlanError, match="'default' of this cluster answers at / already"):
        others({"default": {"route_prefix": "/"}})


def test_a_bundle_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="no bundle at"):
        fleet(Settings(bundles=(str(tmp_path / "nothing"),), on="ray"))


def test_yaml_is_written_over_its_like_alone(bundle: Bundle, tmp_path: Path) -> None:
    file, document = tmp_path / "fleet.yaml", fleet(settings(bundle, write=tmp_path / "fleet.yaml"))
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


def test_the_command_line(
    bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hasten.server.logs.set_up", lambda _: None)  # it would stay for other tests
    file = tmp_path / "fleet.yaml"
    (bundle.path / "config.json").write_text("{}")
    words = ["serve", str(bundle.path), "--on", "ray", "--replicas", "1-4", "--write", str(file)]
    assert main(words) == 0
    _, deployment = parts(yaml.safe_load(file.read_text()))
    assert deployment["autoscaling_config"]["max_replicas"] == 4
    assert main([*words, "--gpus", "0.25"]) == 2
    assert "it has no use for --gpus" in capsys.readouterr().err
    assert main(["serve", str(bundle.path), "--replicas", "2"]) == 2
    assert "--replicas is for a fleet" in capsys.readouterr().err


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
def test_the_model_that_a_request_is_about(method: str, path: str, body: bytes, expected: str | None) -> None:
    path, _, query = path.partition("?")
    router = Router(route for routes in PROTOCOLS for route in routes)
    assert asked_model(router, Exchange(method, path, query, {}, body, lambda _: None)) == expected
