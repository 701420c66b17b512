"""Generates tokens with vLLM, which runs in a separate process with its own interpreter.

Only ``worker.py`` imports it.
"""
