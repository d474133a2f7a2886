"""Rewrite graphs so that they keep their accuracy in low precision."""
