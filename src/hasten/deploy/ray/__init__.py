"""Bundles on Ray Serve: our engine and application in every replica, with Ray's proxy in front of them."""

from hasten.deploy.ray.replica import application

__all__ = ["application"]
