"""The REST endpoints: routes, bodies in, JSON and events out, connections that break."""
