"""The study behind docs/pseudo_to_real.md; `benchmarks/pseudo_to_real.py` is its command.

`variants` says which runs there are, `running` makes them, `step_times` and `depths` measure,
`results` reads what was found, `plots` and `tables` show it.
"""
