"""Generates tokens with vLLM, which runs in a process with an interpreter of its own. Only ``worker.py``
imports vLLM.
"""
