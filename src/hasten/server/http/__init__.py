"""HTTP/1.1 transport: connections, parsing, responses and streaming."""
