"""Manages a model in this process: load, readiness, requests in flight, drain and shutdown."""
