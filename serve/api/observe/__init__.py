"""What operators look at: metrics, an audit log, traces, and a server log, none with content.

An observer is a class with `checked`, `streamed` and `close` (`record.Observer`), given to
`create_app`.
"""
