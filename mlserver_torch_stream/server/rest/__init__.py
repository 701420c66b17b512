"""The REST doors: routes, bodies in, JSON and events out, connections that break."""
