"""TorchServe's gRPC service of inference, on MLServer's port and on one of its own."""
