"""Decodes on several devices at once: each device has a part of the layers and computes a different batch."""
