"""A model's life in this process: load, readiness, requests in flight, drain and shutdown."""
