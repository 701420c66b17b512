"""OpenAI's files and batches: the objects, where they are stored in a folder or bucket, and the runs that answer the
items.
"""
