"""Running a graph that was changed in memory, of any size: weights go to ONNX Runtime beside it, not in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hasten.core.errors import StageError
from hasten.core.hardware import usable_cores
from hasten.graph import all_nodes

# Smaller constants stay where they are: the values of some decide about shapes.
_WEIGHT_BYTES = 2**10


def open_changed(model: Any, folder: Path) -> Any:
    """`folder` is where the weights lie that were not read with the graph."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = usable_cores()
    options.log_severity_level = 3
    # As written: nothing that is asked for may be fused away.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    try:
        graph, weights = _apart(model)
        options.add_external_initializers(list(weights), list(weights.values()))
        return onnxruntime.InferenceSession(graph.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # the binding raises its own unrelated classes
        raise StageError(f"the graph does not open: {error}") from error


def tensor_types(model: Any, folder: Path) -> dict[str, str]:
    """Of all that nodes write, as ONNX Runtime infers them: `tensor(float)`; onnx does not know its operators."""
    import onnx

    outputs = model.graph.output
    count = len(outputs)
    known = {entry.name for entry in outputs}
    written = [name for node in model.graph.node for name in node.output if name and name not in known]
    outputs.extend(onnx.ValueInfoProto(name=name) for name in written)
    try:
        return {entry.name: entry.type for entry in open_changed(model, folder).get_outputs()}
    finally:
        del outputs[count:]


def _apart(model: Any) -> tuple[Any, dict[str, Any]]:
    """The graph with weights that are said to lie elsewhere, and those weights: protobuf ends at 2 GiB."""
    import onnx
    from onnxruntime import OrtValue

    inner = model.graph
    graph = onnx.GraphProto(
        name=inner.name,
        node=inner.node,
        input=inner.input,
        output=inner.output,
        value_info=inner.value_info,
        sparse_initializer=inner.sparse_initializer,
    )
    # Others are forgotten before they could be replaced.
    read = {name for node in all_nodes(inner) for name in node.input} | {entry.name for entry in inner.output}
    weights: dict[str, Any] = {}
    for tensor in inner.initializer:
        if tensor.name not in read:
            continue
        if len(tensor.raw_data) < _WEIGHT_BYTES:  # also one that lies in a file
            graph.initializer.append(tensor)
            continue
        weights[tensor.name] = OrtValue.ortvalue_from_numpy(onnx.numpy_helper.to_array(tensor))
        elsewhere = onnx.TensorProto(name=tensor.name, dims=tensor.dims, data_type=tensor.data_type)
        elsewhere.data_location = onnx.TensorProto.EXTERNAL
        elsewhere.external_data.add(key="location", value="memory")
        graph.initializer.append(elsewhere)
    opened = onnx.ModelProto(
        ir_version=model.ir_version, opset_import=model.opset_import, functions=model.functions, graph=graph
    )
    return opened, weights
