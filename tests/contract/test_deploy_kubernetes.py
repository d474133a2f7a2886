"""What a Deployment says, done without a cluster: the server started as it says, asked where its probes ask."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("uvloop", reason="serving needs hasten[serve]")
pytest.importorskip("yaml", reason="manifests need hasten[deploy]")

import yaml

from hasten.bundle import Bundle
from hasten.cli import main
from serving import Server


def test_a_server_started_as_the_manifest_says_is_ready_and_tells_its_queue(
    classifier_bundle: Bundle, tmp_path: Path
) -> None:
    target = tmp_path / "k8s"
    words = ("--threads", "1", "--instances", "1", "--drain", "5s")
    assert main(["deploy", "kubernetes", str(classifier_bundle.path), "-o", str(target), *words]) == 0
    deployment, autoscaler = (
        yaml.safe_load((target / f"{name}.yaml").read_text()) for name in ("deployment", "autoscaler")
    )
    template = deployment["spec"]["template"]
    container = template["spec"]["containers"][0]
    values = {one["name"]: one["value"] for one in container["env"]}
    # Other ports and another place to write than in a container; all else as it stands there.
    values |= {"HASTEN_HOST": "127.0.0.1", "HASTEN_GRPC_PORT": "0", "HASTEN_CACHE": str(tmp_path / "cache")}
    server = Server(str(classifier_bundle.path), **values)
    try:
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert server.ask("GET", container[probe]["httpGet"]["path"])[0] == 200
        status, _, told = server.ask("GET", template["metadata"]["annotations"]["prometheus.io/path"])
        assert status == 200
        metric = autoscaler["spec"]["metrics"][0]["pods"]["metric"]["name"]
        # The model's name in the cluster is that of the bundle's folder there, which here is its own.
        assert f'{metric}{{model="{deployment["metadata"]["name"]}"}} 0.0' in told.decode()
    finally:
        code, errors = server.stop()
    assert code == 0, errors


def test_kserves_tritonserver_is_sized_for_a_model_that_writes(
    writer_bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which has no graph beside its variants."""
    words = ["--runtime", "tritonserver", "--storage", "s3://models/writer"]
    assert main(["deploy", "kserve", str(writer_bundle.path), "-o", str(tmp_path / "kserve"), *words]) == 0
    assert f"each pod runs {writer_bundle.chosen.name} on" in capsys.readouterr().out
