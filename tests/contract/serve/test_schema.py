"""The OpenAPI document is true: valid requests are answered as described, and invalid ones break nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openapi_spec_validator
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable

from hasten.bundle import Bundle
from support.server_process import Server

pytest.importorskip("uvloop", reason="serving needs hasten[serve]")
schemathesis = pytest.importorskip("schemathesis", reason="needs hasten[dev]")
EXAMPLES = 12


@pytest.fixture(scope="module")
def server(
    tiny_classifier: Any,
    tiny_embedder: Any,
    tiny_model: Any,
    quick_build: Any,
    generator_bundle: Bundle,
    tmp_path_factory: Any,
) -> Iterator[Server]:
    folder, only = tmp_path_factory.mktemp("schema"), {"variants": ["onnxruntime-fp32"]}
    ranker = tiny_model("bert", "ForSequenceClassification", num_labels=1)
    bundles: list[Bundle] = [
        quick_build(tiny_classifier("bert"), folder / "classifier", **only),
        quick_build(tiny_embedder(), folder / "embedder", data=None, **only),
        quick_build(ranker, folder / "ranker", task="text-ranking", data=None, **only),
        generator_bundle,
    ]
    server = Server(*(str(bundle.path) for bundle in bundles), "--threads", "1", "--no-grpc")
    yield server
    code, errors = server.stop()
    assert code == 0, errors
    assert "Traceback" not in errors


def test_document_is_valid_openapi(server: Server) -> None:
    document = server.json("GET", "/openapi.json")
    openapi_spec_validator.validate(document)
    operations = [operation for path in document["paths"].values() for operation in path.values()]
    assert len({operation["operationId"] for operation in operations}) == len(operations) > 20


@pytest.mark.slow
def test_all_routes_respond_as_described(server: Server) -> None:
    from schemathesis import checks

    api = schemathesis.openapi.from_url(f"http://127.0.0.1:{server.port}/openapi.json")
    # A valid body may still request something that the model does not have.
    excluded = [checks.positive_data_acceptance]
    statuses: set[int] = set()
    for result in api.get_all_operations():
        operation = result.ok()
        may_name = not operation.path.endswith(("/load", "/unload"))
        for mode in schemathesis.GenerationMode:
            statuses |= _statuses(operation.as_strategy(generation_mode=mode), may_name, excluded)
    assert {200, 400, 404} <= statuses
    assert not {status for status in statuses if status >= 500}


def _statuses(cases: Any, may_name: bool, excluded: list[Any]) -> set[int]:
    """Return the statuses of generated requests; most name an existing model, if that changes nothing."""
    statuses: set[int] = set()

    @settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(case=cases, name=st.sampled_from(["", "classifier", "embedder", "ranker", "generator"]))
    def check(case: Any, name: str) -> None:
        if name and may_name and "model" in (case.path_parameters or {}):
            case.path_parameters["model"] = name
        statuses.add(case.call_and_validate(excluded_checks=excluded, timeout=20).status_code)

    try:
        check()
    except Unsatisfiable:
        assert not statuses  # a route without parameters has no invalid requests
    return statuses
