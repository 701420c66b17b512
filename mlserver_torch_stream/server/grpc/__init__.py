"""gRPC: V2's messages that MLServer cannot convert, streams, reflection, and Triton's and TorchServe's services."""
