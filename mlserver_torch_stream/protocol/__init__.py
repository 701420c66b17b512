"""Spellings, one file each: they turn a request's bytes into a GenerationRequest, and token events into a reply.

The code of this folder does no I/O.
"""
