"""Findings: claims of papers about attention, each with a protocol, a band and a verdict.

A finding is a file, `conf/finding/NAME.yaml` (`files`). Its runs are made by the code of `train` and `evaluate` and
kept by their config (`running`, `programs`), its numbers are named functions of what they left (`records`,
`quantities`), and its verdict compares their mean over seeds with the band that the file states (`verdicts`, `pages`).
"""
