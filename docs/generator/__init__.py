"""Generates reference pages, benchmark pages and the README's figures from the code and the result files."""
