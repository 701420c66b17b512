"""Runs transformers' forward of a model on new tokens, and prepacks the model's linear layers for CPUs."""
