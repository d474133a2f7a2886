"""What runs inside tritonserver's Python backend, shipped with the repository.

Each module with a `TritonPythonModel`, as that backend wants it, reads what it is told from `about.json` beside it.
"""
