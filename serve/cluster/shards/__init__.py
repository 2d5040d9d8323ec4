"""Rules over several groups of replicas: `make up REPLICAS=2 SHARDS=4`."""
