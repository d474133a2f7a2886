"""Run graphs that were changed in memory; weights are passed to ONNX Runtime separately, so any size works."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hasten.core.errors import StageError
from hasten.core.system.hardware import usable_cores
from hasten.onnx_graph import all_nodes

# Smaller constants stay in the graph: shape inference needs the values of some.
_MIN_WEIGHT_BYTES = 2**10


def open_in_memory(model: Any, folder: Path, *, is_optimized: bool = False) -> Any:
    """Open a session on a model in memory; `folder` holds the weights that were not read with the graph."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = usable_cores()
    options.log_severity_level = 3
    # The arena would keep the memory of the largest batch for as long as the session.
    options.enable_cpu_mem_arena = False
    if not is_optimized:
        # A tensor that is an output must not be fused away.
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    try:
        graph, weights = _separate_weights(model)
        options.add_external_initializers(list(weights), list(weights.values()))
        return onnxruntime.InferenceSession(graph.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # the binding raises its own unrelated classes
        raise StageError(f"ONNX Runtime cannot open the graph: {error}") from error


def tensor_types(model: Any, folder: Path) -> dict[str, str]:
    """Return the types of all node outputs (`tensor(float)`), inferred by ONNX Runtime: onnx lacks its operators."""
    import onnx

    outputs = model.graph.output
    count = len(outputs)
    known = {entry.name for entry in outputs}
    inner = [name for node in model.graph.node for name in node.output if name and name not in known]
    outputs.extend(onnx.ValueInfoProto(name=name) for name in inner)
    try:
        return {entry.name: entry.type for entry in open_in_memory(model, folder).get_outputs()}
    finally:
        del outputs[count:]


def _separate_weights(model: Any) -> tuple[Any, dict[str, Any]]:
    """Return the model with its weights declared as external, and those weights: protobuf is limited to 2 GiB."""
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
    # ONNX Runtime drops unused weights before it could replace them.
    used = {name for node in all_nodes(inner) for name in node.input} | {entry.name for entry in inner.output}
    weights: dict[str, Any] = {}
    for tensor in inner.initializer:
        if tensor.name not in used:
            continue
        if len(tensor.raw_data) < _MIN_WEIGHT_BYTES:  # includes tensors stored in an external file
            graph.initializer.append(tensor)
            continue
        weights[tensor.name] = OrtValue.ortvalue_from_numpy(onnx.numpy_helper.to_array(tensor))
        external = onnx.TensorProto(name=tensor.name, dims=tensor.dims, data_type=tensor.data_type)
        external.data_location = onnx.TensorProto.EXTERNAL
        external.external_data.add(key="location", value="memory")
        graph.initializer.append(external)
    separated = onnx.ModelProto(
        ir_version=model.ir_version, opset_import=model.opset_import, functions=model.functions, graph=graph
    )
    return separated, weights
