"""The package's version, in one place. Imports nothing, so that every room may read it."""

__version__ = "0.1.0"
