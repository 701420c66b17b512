"""Computes attention over pages: defines its interface, a reference with torch's operators, and transformers' hooks."""
