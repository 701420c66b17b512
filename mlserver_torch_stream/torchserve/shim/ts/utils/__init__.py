"""As in torchserve."""
