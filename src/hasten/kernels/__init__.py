"""Triton kernels for packed batches: the tokens of all sequences end to end, without padding.

Each op has its own file, beside a plain PyTorch reference. Triton and PyTorch are imported with them, so only code that
computes on a GPU loads these modules; with `TRITON_INTERPRET=1` they run on the CPU, slowly, for tests.

A layer has two implementations (`encoder.py`). Large batches use cuBLAS for the GEMMs and our kernels between them.
Small batches use four fused kernels per layer, each of which loads its weights while the previous one is running.
"""
