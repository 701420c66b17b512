"""Holds the keys, values and states of sequences in pages, and the prefix cache."""
