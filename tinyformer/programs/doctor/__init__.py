"""Exactness and speed of every attention variant by every backend on this machine, as `tinyformer doctor` reports them.

`variants` is the table of what is tested, `cases` makes modules and masks from it, `exactness` and `speed` measure one
cell, `verdict` compares it with the documented table, `machine` describes the machine, and `report` prints all cells.
`growth`, which benchmarks and findings use, measures time and memory by size; only it imports a package of ours other
than `nn`.
"""
