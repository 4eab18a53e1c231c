"""Mechanisms of heads: what a head reads and writes, which heads it works with, and which of them are enough."""
