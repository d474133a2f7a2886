"""Find and load a model: hub id, directory, ONNX graph, PEFT adapter or object in memory."""
