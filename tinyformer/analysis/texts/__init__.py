"""Attention in texts: maps, relations between words, alignment and predictions."""
