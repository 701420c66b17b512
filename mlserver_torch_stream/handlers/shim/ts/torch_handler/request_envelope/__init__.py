"""Envelopes: they translate a request in a common format for a handler that does not know the format."""
