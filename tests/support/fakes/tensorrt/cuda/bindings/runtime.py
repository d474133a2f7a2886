"""Fake the part of the CUDA runtime that hasten calls for TensorRT, in host memory."""

from __future__ import annotations

import ctypes
from enum import IntEnum

cudaError_t = IntEnum("cudaError_t", {"cudaSuccess": 0})
cudaMemcpyKind = IntEnum("cudaMemcpyKind", {"cudaMemcpyHostToDevice": 1, "cudaMemcpyDeviceToHost": 2})
cudaStreamNonBlocking = 1
SUCCESS = (cudaError_t.cudaSuccess,)
STREAM = 77
ALLOCATIONS: dict[int, ctypes.Array[ctypes.c_char]] = {}


def cudaMalloc(size: int) -> tuple[object, int]:
    memory = ctypes.create_string_buffer(size)
    ALLOCATIONS[ctypes.addressof(memory)] = memory
    return *SUCCESS, ctypes.addressof(memory)


def cudaFree(pointer: int) -> tuple[object, ...]:
    del ALLOCATIONS[pointer]
    return SUCCESS


cudaMallocHost, cudaFreeHost = cudaMalloc, cudaFree


def cudaStreamCreateWithFlags(flags: int) -> tuple[object, int]:
    assert flags == cudaStreamNonBlocking
    return *SUCCESS, STREAM


def cudaStreamSynchronize(stream: int) -> tuple[object, ...]:
    assert stream == STREAM
    return SUCCESS


cudaStreamDestroy = cudaStreamSynchronize


def cudaMemcpyAsync(target: int, source: int, count: int, kind: object, stream: int) -> tuple[object, ...]:
    assert kind in cudaMemcpyKind
    assert stream == STREAM
    ctypes.memmove(target, source, count)
    return SUCCESS
