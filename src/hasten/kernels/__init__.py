"""Kernels in the Triton language for packed batches: tokens of all sequences end to end, no padding anywhere.

One op a file, beside the plain PyTorch that says what it computes. Triton and PyTorch are imported with them, so that
only who computes on a GPU loads these files; with `TRITON_INTERPRET=1` they run on the CPU, slowly, for tests.

Two ways lead through a layer (`encoder.py`). Many tokens: the products are cuBLAS's, and what stands between them is
ours. Few tokens: four kernels a layer, each of which has loaded its weights before the one in front of it is done.
"""
