"""Batches of rows of token ids."""
