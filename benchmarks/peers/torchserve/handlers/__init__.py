"""Handlers as users of TorchServe write them. They run unchanged on TorchServe and on this package's server."""
