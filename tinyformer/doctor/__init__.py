"""Exactness and speed of every attention variant by every backend on this machine, as `tinyformer.doctor` reports them.

`variants` is the table of what is tested, `cases` makes modules and masks of it, `exactness` and `speed` measure one
cell, `verdict` compares it with the documented table, `report` prints all cells. Of our packages it imports `nn` only.
"""
