"""Spellings of a request that are not the handler's own."""
