"""Configs, composed from a command line, a checkpoint or a run folder."""
