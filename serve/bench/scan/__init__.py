"""What a scan of stored conversations costs beside the engine, and what kills and Ray do to it."""
