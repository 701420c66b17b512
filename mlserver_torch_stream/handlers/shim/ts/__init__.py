"""Stands in for the torchserve package in a worker that lacks it. Only the parts that handlers import are here."""

__version__ = "0.12.0"
