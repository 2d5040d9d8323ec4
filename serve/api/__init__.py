"""HTTP around the engine: one file a wire format, each with its own error body.

Knows nothing of vLLM. A wire format is a module with a `router` and an `error_body`, and a row in
`serve.api.app.FORMATS`; `serve/api/check.py` is the one to copy.
"""
