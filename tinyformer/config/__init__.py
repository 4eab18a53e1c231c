"""From a command line, a checkpoint or a run folder to a config."""
