"""The checkpoint: one file, written atomically, and read as plain values and tensors, so that no code in it runs."""
