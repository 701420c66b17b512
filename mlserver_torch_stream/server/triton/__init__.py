"""Triton's gRPC service, on its own port."""
