"""Build the configurations of a repository's models from the bundle's manifest and report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hasten.backends import uniform_batch
from hasten.core.plan import Shapes
from hasten.core.tensors import BATCH, DType, Shape, Signature, TensorSpec, pad
from hasten.deploy.tritonserver.pbtxt import Message, Tensor, Value, Word, entries

_DATATYPES = {DType.INT32: "INT32", DType.INT64: "INT64", DType.FLOAT16: "FP16", DType.FLOAT32: "FP32"}
_KINDS = {"cpu": "KIND_CPU", "cuda": "KIND_GPU"}
# Makes ONNX Runtime compute fp32 matmuls on a GPU in fp32, not in TF32.
WITHOUT_TF32: Message = {
    "execution_accelerators": {
        "gpu_execution_accelerator": [{"name": "cuda", "parameters": entries({"use_tf32": "0"})}]
    }
}
# A repository has one version; a newer one replaces it when it appears.
_NEWEST: Message = {"latest": {"num_versions": 1}}


def tensor(spec: TensorSpec, *, has_batch: bool, is_ragged: bool = False, labels: str = "") -> Tensor:
    """Return the configuration of a tensor of the model, without its first axis if that is the batch axis."""
    sizes = spec.shape[1:] if has_batch else spec.shape
    dims = tuple(size if isinstance(size, int) else -1 for size in sizes)
    return Tensor(spec.name, _DATATYPES[spec.dtype], dims, is_ragged=is_ragged, labels=labels)


def is_batched(signature: Signature) -> bool:
    """Return whether every tensor has a batch axis; a tensor with a row per masked token has none."""
    return all(spec.shape[0] == BATCH for spec in (*signature.inputs, *signature.outputs))


def model(
    name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], max_rows: int, settings: Mapping[str, Value]
) -> Message:
    """Return a model's configuration: the fields common to all models, and its settings."""
    return {
        "name": name,
        **{key: settings[key] for key in ("platform", "backend") if key in settings},
        "max_batch_size": max_rows,
        "version_policy": _NEWEST,
        "input": [tensor.to_message() for tensor in inputs],
        "output": [tensor.to_message() for tensor in outputs],
        **{key: value for key, value in settings.items() if key not in ("platform", "backend")},
    }


def instances(count: int, device: str | None, *, profiles: int = 0, gpus: Sequence[int] = ()) -> Message:
    """Return an instance group; without a device the server chooses one, since a missing kind is an error there.

    The server uses the listed profiles of an engine, and among them the one that fits a batch. On GPUs it starts
    `count` instances on each of `gpus`, or on every GPU if the list is empty.
    """
    return {
        "count": count,
        **({"kind": Word(_KINDS[device])} if device is not None else {}),
        **({"gpus": list(gpus)} if gpus else {}),
        **({"profile": [str(index) for index in range(profiles)]} if profiles else {}),
    }


def ensemble(steps: Sequence[tuple[str, Mapping[str, str], Mapping[str, str]]]) -> Mapping[str, Value]:
    """Return an ensemble of models that run in sequence.

    Each step maps the model's inputs and outputs to names in the ensemble.
    """
    return {
        "platform": "ensemble",
        "ensemble_scheduling": {
            "step": [
                {
                    "model_name": name,
                    "model_version": -1,
                    "input_map": entries(input_names),
                    "output_map": entries(output_names),
                }
                for name, input_names, output_names in steps
            ]
        },
    }


def warmup(
    shapes: Shapes, signature: Signature, inputs: Sequence[TensorSpec]
) -> tuple[list[Message], dict[str, bytes]]:
    """Return warm-up samples of the smallest and the optimal shape, and the files with their (valid) token ids."""
    has_batch = is_batched(signature)
    samples: list[Message] = []
    files: dict[str, bytes] = {}
    for shape in dict.fromkeys([Shape(shapes.batch.min, shapes.sequence.min), shapes.optimal]):
        row = pad(uniform_batch(Shape(1, shape.sequence), signature), signature)
        length = row[signature.inputs[0].name].shape[1]
        sample: dict[str, Value] = {}
        for spec in inputs:
            file = f"{spec.name}-{length}"
            files[file] = row[spec.name].tobytes()
            sample[spec.name] = {
                "data_type": Word(f"TYPE_{_DATATYPES[spec.dtype]}"),
                "dims": [length] if has_batch else [1, length],
                "input_data_file": file,
            }
        rows = shape.batch if has_batch else 1
        samples.append({"name": f"{rows}x{length}", "batch_size": rows, "inputs": entries(sample)})
    return samples, files
