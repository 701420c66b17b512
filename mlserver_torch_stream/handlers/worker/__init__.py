"""Loads and calls a handler in a separate process. Imports neither torch nor MLServer."""
