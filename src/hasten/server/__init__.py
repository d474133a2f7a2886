"""The server: several protocols in front of engines that tokenize, batch, run and decode requests."""
