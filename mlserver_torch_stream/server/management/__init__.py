"""TorchServe's management API, on its own port."""
