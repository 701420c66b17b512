"""Stands in for torchserve's package in a worker without it, and has only what handlers import."""

__version__ = "0.12.0"
