"""What clients and gateways speak: one file a wire format, and what several of them share.

A wire format is a module with a `FORMAT`, and a row in `table.py`. For texts `moderations.py` is
the one to copy, for messages `openai_chat.py`, for a reply that is sent alone `litellm.py`. None
knows of another.
"""
