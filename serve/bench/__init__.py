"""The benchmarks of serving: `python -m serve.bench` lists them. Nobody imports them.

Needed tokens are what any engine has to compute: every conversation once, and the suffix of every
rule put to it. The lower bound is the time that they take on the bare base model, without adapters.
"""
