"""Load on a server: requests that come when they come, whether or not those before them were answered."""
