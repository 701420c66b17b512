"""Runs one call of a model on new tokens: transformers' forward, and its linear layers prepacked for CPUs."""
