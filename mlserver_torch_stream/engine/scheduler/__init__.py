"""Decides which request runs next: admission, the fair queue, limits, and the work of each step. Imports no torch."""
