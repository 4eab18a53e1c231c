"""Runs, made from a config: data, network, Lightning module, trainer, and the results at the end."""
