"""Checks at load that every fast way of computing gives the logits of transformers' own forward."""
