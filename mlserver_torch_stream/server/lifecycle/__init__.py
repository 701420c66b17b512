"""The lifecycle of models and of the process: load, readiness, requests in flight, drain and shutdown."""
