"""Build bundles of generative models."""
