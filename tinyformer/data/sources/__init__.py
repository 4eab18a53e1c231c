"""Sources of rows of text."""
