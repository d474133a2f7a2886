"""Build bundles from models: load, export, check, optimize, verify, benchmark, choose, write."""
