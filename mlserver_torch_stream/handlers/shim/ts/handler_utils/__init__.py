"""Helpers that handlers import, under the names of the torchserve package."""
