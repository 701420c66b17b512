"""TorchServe's management API on a port of its own."""
