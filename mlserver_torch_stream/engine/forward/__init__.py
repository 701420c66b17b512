"""Runs one call of a model on new tokens with transformers' forward, and prepacks its linear layers for CPUs."""
