"""Search for the fastest variant that passes the accuracy gate."""
