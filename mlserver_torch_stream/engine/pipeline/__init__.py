"""Decodes over several devices at once: each has a part of the layers, and each computes another batch."""
