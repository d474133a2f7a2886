"""The configuration of each model of a repository, all of it from the bundle's manifest and report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hasten.backends import uniform_batch
from hasten.core.plan import Shapes
from hasten.core.tensors import BATCH, DType, Shape, Signature, TensorSpec, pad
from hasten.deploy.tritonserver.pbtxt import Message, Tensor, Value, Word, entries

_DATATYPES = {DType.INT32: "INT32", DType.INT64: "INT64", DType.FLOAT16: "FP16", DType.FLOAT32: "FP32"}
_KINDS = {"cpu": "KIND_CPU", "cuda": "KIND_GPU"}
# One of a repository is as good as the next; a newer one takes over when it appears.
_NEWEST: Message = {"latest": {"num_versions": 1}}


def tensor(spec: TensorSpec, *, has_batch: bool, is_ragged: bool = False, labels: str = "") -> Tensor:
    """Of the model, whose first axis is left out where it is the batch's."""
    sizes = spec.shape[1:] if has_batch else spec.shape
    dims = tuple(size if isinstance(size, int) else -1 for size in sizes)
    return Tensor(spec.name, _DATATYPES[spec.dtype], dims, is_ragged=is_ragged, labels=labels)


def is_batched(signature: Signature) -> bool:
    """Whether all tensors have a row for each row: where there is one for each mask, rows cannot be told apart."""
    return all(spec.shape[0] == BATCH for spec in (*signature.inputs, *signature.outputs))


def model(
    name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], max_rows: int, rest: Mapping[str, Value]
) -> Message:
    """What every configuration has, and in front what says who runs it."""
    return {
        "name": name,
        **{key: rest[key] for key in ("platform", "backend") if key in rest},
        "max_batch_size": max_rows,
        "version_policy": _NEWEST,
        "input": [tensor.to_message() for tensor in inputs],
        "output": [tensor.to_message() for tensor in outputs],
        **{key: value for key, value in rest.items() if key not in ("platform", "backend")},
    }


def instances(count: int, device: str | None, *, profiles: int = 0, gpus: Sequence[int] = ()) -> Message:
    """Without a device the server decides: a kind that its machine does not have is an error there.

    Of an engine's profiles the server takes what it is told to, and of these the one that fits a batch. On a GPU it
    starts so many on each, or on each of those that are named.
    """
    return {
        "count": count,
        **({"kind": Word(_KINDS[device])} if device is not None else {}),
        **({"gpus": list(gpus)} if gpus else {}),
        **({"profile": [str(place) for place in range(profiles)]} if profiles else {}),
    }


def without_tf32() -> Message:
    """ONNX Runtime's products on a GPU, in fp32 where that is what they are called."""
    cuda = {"name": "cuda", "parameters": entries({"use_tf32": "0"})}
    return {"execution_accelerators": {"gpu_execution_accelerator": [cuda]}}


def ensemble(steps: Sequence[tuple[str, Mapping[str, str], Mapping[str, str]]]) -> Mapping[str, Value]:
    """Models one after the other: each with the names of its own inputs and outputs, and what they are called here."""
    return {
        "platform": "ensemble",
        "ensemble_scheduling": {
            "step": [
                {
                    "model_name": name,
                    "model_version": -1,
                    "input_map": entries(takes),
                    "output_map": entries(gives),
                }
                for name, takes, gives in steps
            ]
        },
    }


def warmup(shapes: Shapes, signature: Signature, taken: Sequence[TensorSpec]) -> tuple[list[Message], dict[str, bytes]]:
    """The smallest shape and the usual one, and the files with their values: no token that a vocabulary lacks."""
    has_batch = is_batched(signature)
    samples: list[Message] = []
    files: dict[str, bytes] = {}
    for shape in dict.fromkeys([Shape(shapes.batch.min, shapes.sequence.min), shapes.optimal]):
        row = pad(uniform_batch(Shape(1, shape.sequence), signature), signature)
        length = row[signature.inputs[0].name].shape[1]
        given: dict[str, Value] = {}
        for spec in taken:
            file = f"{spec.name}-{length}"
            files[file] = row[spec.name].tobytes()
            given[spec.name] = {
                "data_type": Word(f"TYPE_{_DATATYPES[spec.dtype]}"),
                "dims": [length] if has_batch else [1, length],
                "input_data_file": file,
            }
        rows = shape.batch if has_batch else 1
        samples.append({"name": f"{rows}x{length}", "batch_size": rows, "inputs": entries(given)})
    return samples, files
