"""Serve bundles on Ray Serve: hasten's application in every replica, behind Ray's proxy."""

from hasten.deploy.ray.replica import application

__all__ = ["application"]
