"""Conversations, labelled and not: their turns, and how they are read from rows and requests.

Knows nothing of prompts or models.
"""
