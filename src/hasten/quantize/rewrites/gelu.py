"""Replace erf GELU by ONNX Runtime's FastGelu, the tanh approximation x/2·(1 + tanh(√(2/π)·(x + 0.044715·x³))).

It changes a value by up to 5e-4, so it is applied only if a recipe asks for it.
"""

from __future__ import annotations

from typing import Any

from hasten.onnx_graph import attribute

_DOMAIN = "com.microsoft"
_EXACT_GELUS = ("BiasGelu", "Gelu")


def approximate_gelu(model: Any) -> int:
    """Replace the GELU nodes, which only graphs with ONNX Runtime's operators have, and return their number."""
    from onnx import helper

    replaced = 0
    for node in model.graph.node:
        if node.op_type in _EXACT_GELUS and attribute(node, "approximate", b"none") == b"none":
            del node.attribute[:]
            node.op_type, node.domain = "FastGelu", _DOMAIN
            replaced += 1
    if replaced and all(entry.domain != _DOMAIN for entry in model.opset_import):
        model.opset_import.append(helper.make_opsetid(_DOMAIN, 1))
    return replaced
