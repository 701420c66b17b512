"""A deprecated import path of the torchserve package."""
