"""Checks, when a model loads, that every faster computation reproduces the logits of transformers' own forward."""
