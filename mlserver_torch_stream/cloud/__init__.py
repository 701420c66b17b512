"""Infers the objects of a store as a stream: fetches ahead, batches, delivers in order, resumes after a crash.

Knows objects, order and parts.
"""
