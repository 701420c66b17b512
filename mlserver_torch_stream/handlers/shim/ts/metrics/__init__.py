"""The metrics of handlers, under the names of the torchserve package."""
