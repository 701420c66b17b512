"""A handler's own process: loads it, calls it, sends on what it gives. Imports neither torch nor MLServer."""
