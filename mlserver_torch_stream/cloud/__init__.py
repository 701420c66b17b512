"""Infers the objects of a store as a stream: prefetches them, forms batches, delivers in order, and resumes after a
crash.

This package deals with objects, their order and the parts of an output. The model is a callable that infers a batch.
"""
