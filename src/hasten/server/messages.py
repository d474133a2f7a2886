"""The messages of `inference.GRPCInferenceService`, from a table instead of generated code.

Generated code asks for a protobuf at least as new as its generator, and two copies of `inference` in one process (ours
and tritonclient's) clash; these are built for the protobuf that is installed, in a pool of their own.
"""

from __future__ import annotations

from functools import cache
from typing import Any

PACKAGE = "inference"
SERVICE = f"{PACKAGE}.GRPCInferenceService"

# Message: its fields, as in a .proto file, in the order of their numbers. `?` marks the choices of a oneof,
# `*` what is repeated, `{}` a map from names.
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
METHODS = (
    "ServerLive",
    "ServerReady",
    "ModelReady",
    "ServerMetadata",
    "ModelMetadata",
    "ModelInfer",
    "RepositoryIndex",
    "RepositoryModelLoad",
    "RepositoryModelUnload",
)
STREAM = "ModelStreamInfer"


@cache
def pool() -> Any:
    """Where the messages and the service are described; what reflection reads."""
    from google.protobuf.descriptor_pool import DescriptorPool

    made = DescriptorPool()
    made.Add(_file())
    return made


@cache
def message(name: str) -> Any:
    """The class of a message: `message("ModelInferRequest")`."""
    from google.protobuf.message_factory import GetMessageClass

    return GetMessageClass(pool().FindMessageTypeByName(f"{PACKAGE}.{name}"))


def _file() -> Any:
    from google.protobuf.descriptor_pb2 import FileDescriptorProto

    file = FileDescriptorProto(name="grpc_service.proto", package=PACKAGE, syntax="proto3")
    made: dict[str, Any] = {}
    for name, fields in _MESSAGES.items():
        outer, _, inner = name.rpartition(".")
        # A message within another stands behind it in the table.
        made[name] = made[outer].nested_type.add(name=inner) if outer else file.message_type.add(name=name)
        for number, field in enumerate(fields.split(", ") if fields else (), 1):
            _add_field(made[name], name, number, *field.split(" "))
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


def _add_field(made: Any, owner: str, number: int, kind: str, name: str) -> None:
    from google.protobuf.descriptor_pb2 import FieldDescriptorProto as Field

    bare = kind.rstrip("?*{}")
    is_many = kind.endswith(("*", "{}"))
    field = made.field.add(name=name, number=number, label=Field.LABEL_REPEATED if is_many else Field.LABEL_OPTIONAL)
    if kind.endswith("{}"):
        entry = made.nested_type.add(name=f"{name.capitalize()}Entry")
        entry.options.map_entry = True
        _add_field(entry, owner, 1, "string", "key")
        _add_field(entry, owner, 2, bare, "value")
        field.type, field.type_name = Field.TYPE_MESSAGE, f"{_path(owner)}.{entry.name}"
    elif bare[0].isupper():
        field.type, field.type_name = Field.TYPE_MESSAGE, _path(bare)
    else:
        field.type = getattr(Field, f"TYPE_{bare.upper()}")
    if kind.endswith("?"):
        if not made.oneof_decl:
            made.oneof_decl.add(name="parameter_choice")
        field.oneof_index = 0


def _path(name: str) -> str:
    return f".{PACKAGE}.{name}"
