"""Comparison of finished runs, as `tinyformer compare` prints it. Importing it does not import torch.

`folders` finds and reads runs, `grouping` averages the runs of each setting, `notes` collects caveats, `report` makes
the table, the CSV and the JSON.
"""
