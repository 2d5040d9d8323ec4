"""One replica on paper: arrivals go through the batching of the engine."""
