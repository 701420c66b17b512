"""Checks at load that every fast way of computing reproduces the logits of transformers' own forward."""
