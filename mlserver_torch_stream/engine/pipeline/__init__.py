"""Decoding over several devices at once: each holds a part of the layers, and each works on another group of rows."""
