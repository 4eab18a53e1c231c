"""The checkpoint: one file, written atomically and read without pickle."""
