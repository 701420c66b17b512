"""Keeps answers to a schema, an expression or a grammar, token by token."""
