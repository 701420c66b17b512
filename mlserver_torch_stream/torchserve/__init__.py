"""How a TorchServe handler is run: archives, settings, worker processes, batches, pieces. Knows nothing of engines."""
