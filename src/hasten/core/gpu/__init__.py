"""Buckets and the capture lock, shared by the GPU backends."""
