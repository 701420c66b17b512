"""OpenAI's files and batches: the objects, their places in a folder or bucket, and the runs that answer the rows.

Knows the cloud room, which reads rows and writes their results in order.
"""
