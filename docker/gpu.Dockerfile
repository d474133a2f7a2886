# The server for NVIDIA GPUs: ONNX Runtime's provider for CUDA, and what our own kernels need. `make image GPU=1` builds it.
#
#   docker run --gpus 1 -p 8000:8000 -p 8001:8001 -v ./bundles:/models:ro hasten:gpu
#
# BASE is what docker/Dockerfile builds, on Debian.
ARG BASE=hasten
FROM ${BASE}
USER 0:0
# Triton compiles what launches a kernel where it runs.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
# Both ONNX Runtimes write the same folder: the one for processors goes first.
RUN pip uninstall --yes onnxruntime
RUN pip install --no-cache-dir "onnxruntime-gpu[cuda,cudnn]" nvidia-ml-py safetensors torch triton
# The user has no home.
ENV TRITON_CACHE_DIR=/var/cache/hasten/triton
USER 10001:10001
