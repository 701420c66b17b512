"""Triton's gRPC service on a port of its own."""
