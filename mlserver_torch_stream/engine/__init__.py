"""Generates tokens: schedules, batches and runs a model on its devices. Knows nothing of HTTP, gRPC or MLServer."""
