"""Answer the rows of files with a bundle: read, tokenize, run and write at once, with bounded memory and a resume."""
