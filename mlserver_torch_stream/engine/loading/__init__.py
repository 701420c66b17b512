"""Loads models from files onto their devices, only once for all engines that share a model, and checks the models."""
