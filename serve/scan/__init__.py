"""Every stored conversation judged: `make scan`. Rows in, a row a conversation and rule out; what
is cut off goes on where it was. Knows nothing of HTTP.
"""
