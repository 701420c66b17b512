"""Computes attention over pages: the interface, the reference with torch's operators, and the hooks in transformers."""
