"""Tokenizers, which convert texts to token ids and back."""
