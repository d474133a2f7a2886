"""Metrics, logs, traces and GPU readings."""
