"""Start the server as a Deployment specifies, without a cluster, and send the requests of its probes."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("uvloop", reason="serving needs hasten[serve]")
pytest.importorskip("yaml", reason="manifests need hasten[deploy]")

import yaml

from hasten.bundle import Bundle
from hasten.cli import main
from support.server_process import Server


def test_server_started_from_the_manifest_is_ready_and_exports_its_queue(
    classifier_bundle: Bundle, tmp_path: Path
) -> None:
    target = tmp_path / "k8s"
    words = ("--threads", "1", "--instances", "1", "--drain-timeout", "5s")
    assert main(["deploy", "kubernetes", str(classifier_bundle.path), "-o", str(target), *words]) == 0
    deployment, autoscaler = (
        yaml.safe_load((target / f"{name}.yaml").read_text()) for name in ("deployment", "autoscaler")
    )
    template = deployment["spec"]["template"]
    container = template["spec"]["containers"][0]
    values = {entry["name"]: entry["value"] for entry in container["env"]}
    # Other ports and another cache than in a container; all other values as in the manifest.
    values |= {"HASTEN_HOST": "127.0.0.1", "HASTEN_GRPC_PORT": "0", "HASTEN_CACHE": str(tmp_path / "cache")}
    server = Server(str(classifier_bundle.path), **values)
    try:
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert server.ask("GET", container[probe]["httpGet"]["path"])[0] == 200
        status, _, content = server.ask("GET", template["metadata"]["annotations"]["prometheus.io/path"])
        assert status == 200
        metric = autoscaler["spec"]["metrics"][0]["pods"]["metric"]["name"]
        # In the cluster, the model is named like the bundle's folder, as it is here.
        assert f'{metric}{{model="{deployment["metadata"]["name"]}"}} 0.0' in content.decode()
    finally:
        code, errors = server.stop()
    assert code == 0, errors


def test_tritonserver_pod_on_kserve_is_sized_for_a_generative_model(
    generator_bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such a bundle has no graph beside its variants."""
    words = ["--runtime", "tritonserver", "--storage", "s3://models/generator"]
    assert main(["deploy", "kserve", str(generator_bundle.path), "-o", str(tmp_path / "kserve"), *words]) == 0
    assert f"each pod runs {generator_bundle.chosen.name} on" in capsys.readouterr().out
