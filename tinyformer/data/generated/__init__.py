"""Sequences that a rule generates, whose best possible loss is known."""
