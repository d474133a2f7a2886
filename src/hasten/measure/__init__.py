"""Verify first, time second: whether a variant answers like the original, and how fast."""
