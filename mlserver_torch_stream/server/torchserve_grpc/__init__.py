"""TorchServe's gRPC service for inference, on MLServer's port and on its own port."""
