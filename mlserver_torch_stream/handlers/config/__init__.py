"""Reads TorchServe's archives, model-config.yaml, config.properties, and requests that register models."""
