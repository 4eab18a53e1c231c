"""Every head over all the data: its events, distributions, token classes and vectors, in one pass over a split."""
