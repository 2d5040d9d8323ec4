"""What clients and gateways speak: one file a wire format, and what several of them share.

A wire format is a module with a `router`, `MALFORMED` and an `error_body`, and a row in
`serve.api.app.FORMATS`; `check.py` is the one to copy. None knows of another.
"""
