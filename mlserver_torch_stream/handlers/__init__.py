"""Runs TorchServe handlers: archives, settings, worker processes, batches, pieces. Knows nothing of engines."""
