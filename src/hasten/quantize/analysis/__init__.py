"""Measure activations: calibration, ranges, overflow and sensitivity inputs."""
