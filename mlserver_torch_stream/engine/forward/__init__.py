"""Runs transformers' forward of a model on new tokens."""
