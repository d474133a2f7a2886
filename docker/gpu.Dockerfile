# The server image for NVIDIA GPUs, with ONNX Runtime's CUDA provider and the packages of our kernels. `make image GPU=1`
# builds it.
#
#   docker run --gpus 1 -p 8000:8000 -p 8001:8001 -v ./bundles:/models:ro hasten:gpu
#
# BASE is the image of docker/Dockerfile, on Debian.
ARG BASE=hasten
FROM ${BASE}
USER 0:0
# Triton compiles kernel launchers at run time.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
# Both ONNX Runtime packages install to the same folder, so the CPU package is removed first.
RUN pip uninstall --yes onnxruntime
RUN pip install --no-cache-dir "onnxruntime-gpu[cuda,cudnn]" nvidia-ml-py safetensors torch triton
# The user has no home directory.
ENV TRITON_CACHE_DIR=/var/cache/hasten/triton
USER 10001:10001
