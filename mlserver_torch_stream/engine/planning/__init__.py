"""What a model needs and what a device gives it, worked out before anything is loaded."""
