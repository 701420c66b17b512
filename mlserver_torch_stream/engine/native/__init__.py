"""Runs C++ kernels: a whole decoder in one call for the model layouts that they support, parts of other models."""
