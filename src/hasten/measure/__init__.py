"""Verify variants against a reference, then benchmark them."""
