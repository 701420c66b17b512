"""Who may ask: keys and TLS of every port of the server."""
