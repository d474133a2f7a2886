"""Define the messages of `inference.GRPCInferenceService` in a table instead of generated code.

Generated code needs a protobuf at least as new as its generator, and two copies of `inference` in one process (ours and
tritonclient's) clash. These messages are built for the installed protobuf, in a separate descriptor pool.
"""

from __future__ import annotations

from functools import cache
from typing import Any

PACKAGE = "inference"
SERVICE = f"{PACKAGE}.GRPCInferenceService"

# The fields of each message, as in a .proto file, in the order of their numbers. `?` marks the choices of a oneof,
# `*` repeated fields, and `{}` maps with string keys.
_MESSAGES = {
    "ServerLiveRequest": "",
    "ServerLiveResponse": "bool live",
    "ServerReadyRequest": "",
    "ServerReadyResponse": "bool ready",
    "ModelReadyRequest": "string name, string version",
    "ModelReadyResponse": "bool ready",
    "ServerMetadataRequest": "",
    "ServerMetadataResponse": "string name, string version, string* extensions",
    "ModelMetadataRequest": "string name, string version",
    "ModelMetadataResponse": "string name, string* versions, string platform, "
    "ModelMetadataResponse.TensorMetadata* inputs, ModelMetadataResponse.TensorMetadata* outputs",
    "ModelMetadataResponse.TensorMetadata": "string name, string datatype, int64* shape",
    "InferParameter": "bool? bool_param, int64? int64_param, string? string_param, double? double_param, "
    "uint64? uint64_param",
    "InferTensorContents": "bool* bool_contents, int32* int_contents, int64* int64_contents, uint32* uint_contents, "
    "uint64* uint64_contents, float* fp32_contents, double* fp64_contents, bytes* bytes_contents",
    "ModelInferRequest": "string model_name, string model_version, string id, InferParameter{} parameters, "
    "ModelInferRequest.InferInputTensor* inputs, ModelInferRequest.InferRequestedOutputTensor* outputs, "
    "bytes* raw_input_contents",
    "ModelInferRequest.InferInputTensor": "string name, string datatype, int64* shape, InferParameter{} parameters, "
    "InferTensorContents contents",
    "ModelInferRequest.InferRequestedOutputTensor": "string name, InferParameter{} parameters",
    "ModelInferResponse": "string model_name, string model_version, string id, InferParameter{} parameters, "
    "ModelInferResponse.InferOutputTensor* outputs, bytes* raw_output_contents",
    "ModelInferResponse.InferOutputTensor": "string name, string datatype, int64* shape, "
    "InferParameter{} parameters, InferTensorContents contents",
    "ModelStreamInferResponse": "string error_message, ModelInferResponse infer_response",
    "ModelRepositoryParameter": "bool? bool_param, int64? int64_param, string? string_param, bytes? bytes_param",
    "RepositoryIndexRequest": "string repository_name, bool ready",
    "RepositoryIndexResponse": "RepositoryIndexResponse.ModelIndex* models",
    "RepositoryIndexResponse.ModelIndex": "string name, string version, string state, string reason",
    "RepositoryModelLoadRequest": "string repository_name, string model_name, ModelRepositoryParameter{} parameters",
    "RepositoryModelLoadResponse": "",
    "RepositoryModelUnloadRequest": "string repository_name, string model_name, ModelRepositoryParameter{} parameters",
    "RepositoryModelUnloadResponse": "",
}
METHODS = tuple(name.removesuffix("Request") for name in _MESSAGES if name.endswith("Request"))
STREAM = "ModelStreamInfer"


@cache
def pool() -> Any:
    """Return the descriptor pool of the messages and the service, which reflection also reads."""
    from google.protobuf.descriptor_pool import DescriptorPool

    descriptors = DescriptorPool()
    descriptors.Add(_file())
    return descriptors


@cache
def message(name: str) -> Any:
    """Return the class of a message: `message("ModelInferRequest")`."""
    from google.protobuf.message_factory import GetMessageClass

    return GetMessageClass(pool().FindMessageTypeByName(f"{PACKAGE}.{name}"))


def _file() -> Any:
    from google.protobuf.descriptor_pb2 import FileDescriptorProto

    file = FileDescriptorProto(name="grpc_service.proto", package=PACKAGE, syntax="proto3")
    messages: dict[str, Any] = {}
    for name, fields in _MESSAGES.items():
        outer, _, inner = name.rpartition(".")
        # A nested message comes after its outer message in the table.
        messages[name] = messages[outer].nested_type.add(name=inner) if outer else file.message_type.add(name=name)
        for number, field in enumerate(fields.split(", ") if fields else (), 1):
            _add_field(messages[name], name, number, *field.split(" "))
    service = file.service.add(name=SERVICE.rpartition(".")[2])
    for method in METHODS:
        service.method.add(name=method, input_type=_path(f"{method}Request"), output_type=_path(f"{method}Response"))
    service.method.add(
        name=STREAM,
        input_type=_path("ModelInferRequest"),
        output_type=_path("ModelStreamInferResponse"),
        client_streaming=True,
        server_streaming=True,
    )
    return file


def _add_field(parent: Any, owner: str, number: int, kind: str, name: str) -> None:
    from google.protobuf.descriptor_pb2 import FieldDescriptorProto as Field

    base = kind.rstrip("?*{}")
    is_repeated = kind.endswith(("*", "{}"))
    field = parent.field.add(
        name=name, number=number, label=Field.LABEL_REPEATED if is_repeated else Field.LABEL_OPTIONAL
    )
    if kind.endswith("{}"):
        entry = parent.nested_type.add(name=f"{name.capitalize()}Entry")
        entry.options.map_entry = True
        _add_field(entry, owner, 1, "string", "key")
        _add_field(entry, owner, 2, base, "value")
        field.type, field.type_name = Field.TYPE_MESSAGE, f"{_path(owner)}.{entry.name}"
    elif base[0].isupper():
        field.type, field.type_name = Field.TYPE_MESSAGE, _path(base)
    else:
        field.type = getattr(Field, f"TYPE_{base.upper()}")
    if kind.endswith("?"):
        if not parent.oneof_decl:
            parent.oneof_decl.add(name="parameter_choice")
        field.oneof_index = 0


def _path(name: str) -> str:
    return f".{PACKAGE}.{name}"
