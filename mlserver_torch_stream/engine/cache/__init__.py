"""Holds the keys, values and states of sequences, in pages and slots, and the prefix cache."""
