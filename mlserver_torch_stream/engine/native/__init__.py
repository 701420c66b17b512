"""Runs a decoder in one call of C++ kernels, which are compiled on this machine, for the layouts that they know."""
