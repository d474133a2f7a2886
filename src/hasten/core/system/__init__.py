"""The machine: hardware, limits, caches and files."""
