"""The atlas of heads: for each head, what it attends to over a whole split, and the head's measures and vectors."""
