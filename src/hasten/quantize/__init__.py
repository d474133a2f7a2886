"""Graphs of lower precision, made with the runtimes' own tools. Whether they may be used, the gate decides."""
