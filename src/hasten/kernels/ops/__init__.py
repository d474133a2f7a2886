"""Triton kernels, one fused operation per file, each beside its plain PyTorch reference."""
