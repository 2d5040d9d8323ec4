"""Rules over several groups of replicas: `make up REPLICAS=2 SHARDS=4`.

placement.py    which rule is on which shard
shard.py        a shard: its replicas, and what these serve
shard_rules.py  a rule of a shard changes on all its replicas or on none
rules.py        the rules of all shards, and how one changes
service.py      a check by all shards that have one of its rules, as the wire formats ask for it
"""
