"""Runs a model with tensor parallelism: each rank holds a part of every layer.

Rank 0 runs the engine and the other ranks follow it.
"""
