"""The offline generator.

A rule's phrases -> labelled conversations, without a model and without a network.
"""
