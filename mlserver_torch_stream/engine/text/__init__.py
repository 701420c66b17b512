"""Converts text to token ids and back, and finds stop strings."""
