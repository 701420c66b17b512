"""One file per spelling: bytes of a request to a GenerationRequest, token events to a reply. Pure functions."""
