"""What comes in: how large a request may be, how long it may take, and how its body is read.

Knows nothing of who asks, and of what is asked.
"""
