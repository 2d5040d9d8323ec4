"""The benchmark of the server over HTTP."""
