"""Defines the package's version. Imports nothing, so that every room may read it."""

__version__ = "0.1.0"
