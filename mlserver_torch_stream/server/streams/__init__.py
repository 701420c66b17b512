"""Answers the messages of gRPC streams."""
