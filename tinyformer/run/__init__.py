"""From a config to a run: data, network, Lightning module, trainer, and what a run reports at its end."""
