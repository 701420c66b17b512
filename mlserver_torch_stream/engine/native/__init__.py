"""Runs a whole decoder in one call of C++ kernels, for the model layouts that they support."""
