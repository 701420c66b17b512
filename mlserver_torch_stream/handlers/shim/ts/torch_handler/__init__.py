"""The base class of handlers and the request envelopes, under the names of the torchserve package."""
