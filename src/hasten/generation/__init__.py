"""Writing text with a model that was opened: the next token, the text of tokens, chats, many rows at once."""
