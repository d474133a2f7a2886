"""What runs inside tritonserver's Python backend: shipped with the repository, never imported here.

Each module has a `TritonPythonModel`, as that backend wants it, and reads `about.json` beside it.
"""
