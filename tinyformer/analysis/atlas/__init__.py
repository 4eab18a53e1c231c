"""The atlas of heads: what each head attends to over all of a split, its measures and its vectors."""
