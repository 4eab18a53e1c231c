"""Checkpoints from and to Hugging Face folders, as `tinyformer convert` makes them. Importing it does not import torch.

`importing` turns a folder into a checkpoint, `exporting` a checkpoint into a folder, `configs` holds what both need.
"""
