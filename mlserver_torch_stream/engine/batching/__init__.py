"""Sequences decoded together: the interface that the engine core steps, and its three implementations."""
