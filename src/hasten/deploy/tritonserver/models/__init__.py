"""Models for tritonserver's Python backend, vendored into the repository.

Each module defines a `TritonPythonModel`, as the backend requires, which reads its configuration from `about.json`.
"""
