"""Run engines in TensorRT for RTX, on GeForce RTX and RTX PRO GPUs. Experimental: tried only if named.

Everything but the library is that of the backend `tensorrt`. NVIDIA's parser and builder were run, its runtime never.
"""

from hasten.backends.tensorrt import TensorRT
from hasten.backends.tensorrt.library import TENSORRT_RTX

BACKEND = TensorRT(
    TENSORRT_RTX, "experimental: its parser and builder were run, its runtime never; tried only if named (--variants)"
)
