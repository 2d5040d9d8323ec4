"""Several replicas of the server behind one address, on Ray Serve: `make up REPLICAS=2 SHARDS=2`.

`start.py` starts replicas on this machine, `kubernetes.py` on a Ray that others run; `front/` is in
front of them, `shards/` has their rules. Only `ray_pool.py` and `kubernetes.py` import Ray.

A check is one routing decision for each shard: its rules fan out inside the replica that has its
conversation.
"""
