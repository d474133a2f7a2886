"""Rewrite ONNX graphs without changing their results."""
