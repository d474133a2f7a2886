"""Loaded models: the registry, hot reload, and a module per model family."""
