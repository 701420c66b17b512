"""Computes the memory and speed of a model on a device before anything is loaded."""
