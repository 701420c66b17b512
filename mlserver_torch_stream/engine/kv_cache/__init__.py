"""Holds the keys, values and states of sequences, and the prefix cache."""
