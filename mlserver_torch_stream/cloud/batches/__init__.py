"""OpenAI's files and batches: the objects, their places in a folder or bucket, and the runs that answer the items."""
