"""Small ONNX models, serialized without the onnx package."""
