"""TorchServe 0.12 and our server side by side: one model store, the same clients, replies compared case by case."""
