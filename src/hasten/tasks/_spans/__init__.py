"""Span extraction for question answering."""
