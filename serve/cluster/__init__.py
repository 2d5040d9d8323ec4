"""Several replicas of the server behind one address, on Ray Serve: `make up REPLICAS=2 SHARDS=2`.

    size.py       how many replicas
    start.py      starts them, and ends with them
    front/        what listens: who may ask, which replica answers, how all of them are
    shards/       rules, on one group of replicas or split over several; how one changes
    snapshots.py  the folders that are served, kept as they were
    served.py     which rules all replicas serve
    replica.py    a replica: the app of `serve/api` in one process
    messages.py   HTTP as values, and an app that answers them without a socket
    pool.py       the replicas as the ingress sees them
    ray_pool.py   Ray: the only file beside `kubernetes.py` that imports it
    log.py        the replicas' log lines, on the server's stderr

A check is one routing decision for each shard: its rules fan out inside the replica that has its
conversation.
"""
