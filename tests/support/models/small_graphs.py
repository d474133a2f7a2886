"""Small ONNX graphs, put together operator by operator."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

WIDTH, WIDE, WORDS = 16, 48, 40
FUSED = "com.microsoft"


class Graph:
    """A graph from `input_ids` to `result`: an embedding lookup, followed by the nodes of a test."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self.random = np.random.default_rng(3)
        self.hidden = self.add("Gather", self.weight(WORDS, WIDTH, scale=1.0), "input_ids", name="words")

    def add(self, kind: str, *inputs: str, name: str | None = None, **attributes: Any) -> str:
        output = f"{kind}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [output], name=output if name is None else name, **attributes))
        return output

    def constant(self, values: Any) -> str:
        name = f"constant_{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(values), name))
        return name

    def weight(self, *shape: int, scale: float = 0.3) -> str:
        return self.constant(self.random.normal(scale=scale, size=shape).astype(np.float32))

    def matmul(self, tensor: str, inputs: int, outputs: int, name: str) -> str:
        return self.add("MatMul", tensor, self.weight(inputs, outputs), name=name)

    def norm(self, tensor: str) -> str:
        return self.add("LayerNormalization", tensor, self.weight(WIDTH, scale=1.0), self.weight(WIDTH), axis=-1)

    def erf_gelu(self, tensor: str) -> str:
        erf = self.add("Erf", self.add("Div", tensor, self.constant(np.float32(2**0.5))))
        shifted = self.add("Add", erf, self.constant(np.float32(1)))
        return self.add("Mul", self.add("Mul", tensor, shifted), self.constant(np.float32(0.5)))

    def model(self, result: str, *more_outputs: str, opset: int = 17) -> Any:
        self.nodes.append(helper.make_node("Identity", [result], ["result"]))
        outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("result", *more_outputs)]
        ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "sequence"])
        graph = helper.make_graph(self.nodes, "test", [ids], outputs, self.constants)
        opsets = [helper.make_opsetid("", opset), helper.make_opsetid(FUSED, 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def gated(graph: Graph) -> str:
    gate = graph.add("Sigmoid", graph.matmul(graph.hidden, WIDTH, WIDE, "gate"))
    up = graph.matmul(graph.hidden, WIDTH, WIDE, "up")
    return graph.matmul(graph.add("Mul", gate, up), WIDE, WIDTH, "second")


def run(model: Any, output: str = "result") -> np.ndarray:
    """Run the graph without optimizations."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    ids = np.random.default_rng(5).integers(0, WORDS, (3, 6))
    result: np.ndarray = session.run([output], {"input_ids": ids})[0]
    return result
