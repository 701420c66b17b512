"""Attention over pages: the interface, the plain torch reference, and how transformers' models come to call it."""
