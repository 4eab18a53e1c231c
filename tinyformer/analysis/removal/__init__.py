"""The removal of heads: ablation, importance, pruning, circuits and redundancy."""
