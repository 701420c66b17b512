"""API keys and TLS for every port of the server."""
