"""The request and reply formats of all APIs, called spellings, one file each. A spelling turns a request's bytes into a
GenerationRequest, and token events into a reply.

The code of this folder does no I/O.
"""
