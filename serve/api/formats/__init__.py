"""What clients and gateways speak: one file a wire format, and what several of them share.

A wire format is a module with a `router`, `MALFORMED` and an `error_body`, and a row in
`serve.api.app.FORMATS`. For texts `moderations.py` is the one to copy, for messages `detectors.py`,
for a reply that is sent alone `agentgateway.py`; CONTRIBUTING.md lists the rest. None knows of
another.
"""
