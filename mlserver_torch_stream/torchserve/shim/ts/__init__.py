"""Stands in for torchserve's package in a worker where that is not installed: what handlers import from it, no more."""

__version__ = "0.12.0"
