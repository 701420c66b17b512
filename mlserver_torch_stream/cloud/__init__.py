"""Streaming inference over objects: fetched ahead, batched, inferred, delivered in order, resumed after a crash.

Knows objects, order and parts; of models nothing: it is given one callable that infers a batch of rows.
"""
