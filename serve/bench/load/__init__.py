"""Open-loop load on one engine: latencies at rising rates."""
