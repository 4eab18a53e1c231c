"""Rows of token ids to batches."""
