"""Finished runs side by side, as `tinyformer.compare` shows them. It imports no torch.

`folders` finds runs and reads them, `grouping` says which of them are one setting and averages those, `notes` what a
reader should know before believing it, `report` makes the table, the CSV and the JSON.
"""
