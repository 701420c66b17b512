"""REST: routes, bodies, JSON replies, server-sent events, and connections that break."""
