"""Infers the objects of a store as a stream: fetches ahead, batches, delivers in order, resumes after a crash.

The room deals with objects, their order and the parts of an output. The model is a callable that infers a batch.
"""
