"""Exports metrics, and writes one log line and one span for each request."""
