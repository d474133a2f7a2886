"""API protocols of the server, one file each; each lists its `ROUTES`."""
