"""Metrics, and for each request one log line and one span."""
