"""Runs the workers of a model: their processes and ranks, their batches, their scaling and their streams of pieces."""
