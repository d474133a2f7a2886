"""Serve with several processes: API workers in front of engine processes that own the models' sessions."""
