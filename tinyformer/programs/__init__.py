"""The programs other than training and evaluation: `card`, `compare`, `convert`, `doctor` and `findings`."""
