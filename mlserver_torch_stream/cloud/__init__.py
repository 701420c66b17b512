"""Infers the objects of a store as a stream: fetches ahead, batches, delivers in order, resumes after a crash.

Knows objects, order and parts. Knows nothing of models: its caller passes one callable that infers a batch of rows.
"""
