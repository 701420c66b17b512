"""Serves V2 over gRPC: messages that MLServer cannot convert, streams, and Triton's service."""
