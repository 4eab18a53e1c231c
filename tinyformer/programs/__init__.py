"""The programs beside training and evaluation: `card`, `compare`, `convert`, `doctor` and `findings`."""
