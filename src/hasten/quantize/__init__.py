"""Quantize graphs with the runtimes' own tools; the accuracy gate decides whether the results are used."""
