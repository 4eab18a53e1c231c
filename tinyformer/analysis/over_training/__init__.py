"""Analyses over the snapshots of a run."""
