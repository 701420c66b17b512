"""Runs the workers of a model: batches, processes, ranks, scaling, and the stream of response pieces."""
