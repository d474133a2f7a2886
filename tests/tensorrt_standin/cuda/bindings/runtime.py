"""The part of CUDA's runtime that hasten calls for TensorRT, in the host's memory."""

from __future__ import annotations

import ctypes
from enum import IntEnum

cudaError_t = IntEnum("cudaError_t", {"cudaSuccess": 0})
cudaMemcpyKind = IntEnum("cudaMemcpyKind", {"cudaMemcpyHostToDevice": 1, "cudaMemcpyDeviceToHost": 2})
cudaStreamNonBlocking = 1
DONE = (cudaError_t.cudaSuccess,)
STREAM = 77
HELD: dict[int, ctypes.Array[ctypes.c_char]] = {}


def cudaMalloc(size: int) -> tuple[object, int]:
    memory = ctypes.create_string_buffer(size)
    HELD[ctypes.addressof(memory)] = memory
    return *DONE, ctypes.addressof(memory)


def cudaFree(pointer: int) -> tuple[object, ...]:
    del HELD[pointer]
    return DONE


cudaMallocHost, cudaFreeHost = cudaMalloc, cudaFree


def cudaStreamCreateWithFlags(flags: int) -> tuple[object, int]:
    assert flags == cudaStreamNonBlocking
    return *DONE, STREAM


def cudaStreamSynchronize(stream: int) -> tuple[object, ...]:
    assert stream == STREAM
    return DONE


cudaStreamDestroy = cudaStreamSynchronize


def cudaMemcpyAsync(target: int, source: int, count: int, kind: object, stream: int) -> tuple[object, ...]:
    assert kind in cudaMemcpyKind
    assert stream == STREAM
    ctypes.memmove(target, source, count)
    return DONE
