"""Serves gRPC: messages of V2 that MLServer cannot convert, streams, and Triton's and TorchServe's services."""
