"""Several replicas of the server behind one address, on Ray Serve: `make up REPLICAS=2`.

Each replica is a process with an engine of its own (`replica.py`). `front/` is what listens in
front of them, `service.py` has their rules. Only `ray_pool.py` imports Ray.
"""
