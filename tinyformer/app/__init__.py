"""From a config to a run: entry points, errors, the steps of training and evaluation. Importing it imports no torch."""
