"""Export PyTorch modules to ONNX."""
