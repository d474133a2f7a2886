"""Queues, batching, admission control and worker threads."""
