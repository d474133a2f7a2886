"""One engine, many protocols: requests are parsed, encoded, batched across each other, run and decoded."""
