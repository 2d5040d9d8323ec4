"""Rule sets: which rules are asked together, and what their verdicts mean together.

Knows nothing of engines and of HTTP.
"""
