"""Tokenization."""
