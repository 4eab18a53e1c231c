"""Generation of tokens: sampling and beam search."""
