"""The decode loop: token ids, tensors, devices. Knows nothing of HTTP, gRPC or MLServer."""
