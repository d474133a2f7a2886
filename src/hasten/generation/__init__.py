"""Generate text with a decoder: sampling, beam search, detokenization, chats and continuous batching."""
