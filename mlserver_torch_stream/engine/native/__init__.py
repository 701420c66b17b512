"""Decoding in one call of C++ kernels, compiled on this machine, for the models whose layout they know."""
