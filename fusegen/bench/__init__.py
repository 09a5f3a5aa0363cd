"""The benchmark: fusegen beside eager torch and torch.compile, in multiples of a copy of x.

`works` says what is measured and what is aimed at; `rivals`, `timing`, `precision` and `measure` do
it for one work, `builds` for first calls and kernels; `session` makes a run of it. A run is one
report, kept as JSON, of which `table`, `markdown` and `plot` show everything again.
"""
