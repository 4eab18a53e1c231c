"""Mechanisms of heads: attribution, patching, edges between heads, gates, circuits in the weights, and lenses."""
