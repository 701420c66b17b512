"""Loads models from files onto their devices, once for all engines that share a model, and checks them there."""
