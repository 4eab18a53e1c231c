"""What this machine computes, exactly and how fast: every attention by every backend, as `tinyformer.doctor` shows it.

`cases` are what is examined, `exactness` and `speed` measure one of them, `verdict` says of each whether the
documented table holds, `report` prints it. It imports `nn` and nothing else of ours.
"""
