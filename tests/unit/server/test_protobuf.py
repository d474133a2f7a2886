"""Our messages of `inference.GRPCInferenceService` compared with the generated ones of tritonclient."""

from __future__ import annotations

from typing import Any

import pytest

from hasten.server.grpc.protobuf import METHODS, SERVICE, STREAM, message, pool


@pytest.fixture(scope="module")
def theirs() -> Any:
    return pytest.importorskip("tritonclient.grpc.service_pb2", reason="tritonclient is not installed")


def wire_format(kind: Any) -> dict[str, tuple[object, ...]]:
    """Return everything that determines the wire format of a message, by field name, including map entries."""
    return {
        field.name: (
            field.number,
            field.type,
            field.is_repeated,
            field.has_presence,
            field.containing_oneof.name if field.containing_oneof else None,
            field.message_type.full_name if field.message_type else None,
            field.message_type.GetOptions().map_entry if field.message_type else False,
            wire_format(field.message_type) if field.message_type and field.message_type.GetOptions().map_entry else {},
        )
        for field in kind.fields
    }


def with_nested(kind: Any) -> list[Any]:
    return [kind, *(deeper for inner in kind.nested_types for deeper in with_nested(inner))]


def message_names() -> list[str]:
    file = pool().FindFileContainingSymbol(SERVICE)
    return [kind.full_name for outer in file.message_types_by_name.values() for kind in with_nested(outer)]


@pytest.mark.parametrize("name", message_names())
def test_message_equals_tritonclients(name: str, theirs: Any) -> None:
    known = {
        kind.full_name: kind
        for outer in theirs.DESCRIPTOR.message_types_by_name.values()
        for kind in with_nested(outer)
    }
    assert wire_format(pool().FindMessageTypeByName(name)) == wire_format(known[name])


def test_methods_equal_tritonclients(theirs: Any) -> None:
    ours = pool().FindServiceByName(SERVICE)
    known = theirs.DESCRIPTOR.services_by_name[ours.name]
    assert [method.name for method in ours.methods] == [*METHODS, STREAM]
    for method in ours.methods:
        other = known.methods_by_name[method.name]
        for direction in ("input_type", "output_type"):
            assert getattr(method, direction).full_name == getattr(other, direction).full_name
        assert (method.client_streaming, method.server_streaming) == (other.client_streaming, other.server_streaming)


def test_messages_are_interchangeable_with_tritonclients_in_one_process(theirs: Any) -> None:
    request = theirs.ModelInferRequest(model_name="m", id="7", raw_input_contents=[b"\x01\x00"])
    request.inputs.add(name="text", datatype="BYTES", shape=[1, 2]).contents.bytes_contents.append(b"a")
    request.inputs[0].contents.fp64_contents.extend([0.5, -1.0])
    request.outputs.add(name="logits").parameters["binary_data"].bool_param = True
    for index, (kind, value) in enumerate(
        [("bool", True), ("int64", -3), ("string", "ü"), ("double", 0.25), ("uint64", 2**63)]
    ):
        setattr(request.parameters[str(index)], f"{kind}_param", value)
    ours = message("ModelInferRequest").FromString(request.SerializeToString())
    assert ours.parameters["2"].string_param == "ü"
    assert ours.parameters["4"].WhichOneof("parameter_choice") == "uint64_param"
    assert list(ours.inputs[0].contents.fp64_contents) == [0.5, -1.0]
    assert theirs.ModelInferRequest.FromString(ours.SerializeToString()) == request
