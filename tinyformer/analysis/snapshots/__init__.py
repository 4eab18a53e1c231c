"""How a model came to be: what changes from one snapshot of its training to the next."""
