"""The API's description is true: whatever it allows is answered as it says, and nothing it forbids breaks anything."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable

from hasten.bundle import Bundle
from serving import Server

pytest.importorskip("uvloop", reason="serving needs hasten[serve]")
schemathesis = pytest.importorskip("schemathesis", reason="needs hasten[dev]")
EXAMPLES = 12


@pytest.fixture(scope="module")
def server(
    tiny_classifier: Any,
    tiny_embedder: Any,
    tiny_model: Any,
    quick_build: Any,
    writer_bundle: Bundle,
    tmp_path_factory: Any,
) -> Iterator[Server]:
    folder, only = tmp_path_factory.mktemp("schema"), {"variants": ["onnxruntime-fp32"]}
    ranker = tiny_model("bert", "ForSequenceClassification", num_labels=1)
    bundles: list[Bundle] = [
        quick_build(tiny_classifier("bert"), folder / "classifier", **only),
        quick_build(tiny_embedder(), folder / "embedder", data=None, **only),
        quick_build(ranker, folder / "ranker", task="text-ranking", data=None, **only),
        writer_bundle,
    ]
    started = Server(*(str(bundle.path) for bundle in bundles), "--threads", "1", "--no-grpc")
    yield started
    code, errors = started.stop()
    assert code == 0, errors
    assert "Traceback" not in errors


def test_it_is_openapi(server: Server) -> None:
    validator = pytest.importorskip("openapi_spec_validator", reason="a validator of OpenAPI documents")
    document = server.json("GET", "/openapi.json")
    validator.validate(document)
    operations = [operation for path in document["paths"].values() for operation in path.values()]
    assert len({operation["operationId"] for operation in operations}) == len(operations) > 20


@pytest.mark.slow
def test_all_routes_answer_as_described(server: Server) -> None:
    from schemathesis import checks

    api = schemathesis.openapi.from_url(f"http://127.0.0.1:{server.port}/openapi.json")
    # A body may fit its type and still ask for what a model does not have.
    not_promised = [checks.positive_data_acceptance]
    answered: set[int] = set()
    for found in api.get_all_operations():
        operation = found.ok()
        may_name = not operation.path.endswith(("/load", "/unload"))
        for mode in schemathesis.GenerationMode:
            answered |= _ask(operation.as_strategy(generation_mode=mode), may_name, not_promised)
    assert {200, 400, 404} <= answered
    assert not {status for status in answered if status >= 500}


def _ask(cases: Any, may_name: bool, excluded: list[Any]) -> set[int]:
    """What the cases are answered with; half of them about models that are there, where that changes nothing."""
    answered: set[int] = set()

    @settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(case=cases, name=st.sampled_from(["", "classifier", "embedder", "ranker", "writer"]))
    def check(case: Any, name: str) -> None:
        if name and may_name and "model" in (case.path_parameters or {}):
            case.path_parameters["model"] = name
        answered.add(case.call_and_validate(excluded_checks=excluded, timeout=20).status_code)

    try:
        check()
    except Unsatisfiable:
        assert not answered  # nothing about a route without parameters can be wrong
    return answered
