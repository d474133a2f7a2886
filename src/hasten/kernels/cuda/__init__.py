"""CUDA driver calls, graph capture and replay."""
