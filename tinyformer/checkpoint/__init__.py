"""The checkpoint: one file, written atomically, and loaded as plain values and tensors, so that it cannot run code."""
