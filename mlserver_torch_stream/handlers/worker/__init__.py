"""Loads and calls a handler in a process of its own. Imports neither torch nor MLServer."""
