"""Formats of requests that are not the handler's own."""
