"""What the embedded base is taught: conversations, rules about them, and the teacher's
embeddings.
"""
