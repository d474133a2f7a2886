"""Matrix multiplication through cuBLASLt, PyTorch or Triton."""
