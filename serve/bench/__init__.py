"""The benchmarks of serving: `python -m serve.bench` lists them. Nobody imports them.

Two words that all reports use:

    needed tokens   what any engine has to compute: every conversation once, and the suffix of every
                    rule put to it
    lower bound     the time that the needed tokens take without adapters. Of an engine: the bare
                    base model prefilling them as one prompt, or answering the same requests. Of
                    the low-rank products alone, which have no base, the roofline: reading the
                    weights once or multiplying at full rate, whichever takes longer
"""
