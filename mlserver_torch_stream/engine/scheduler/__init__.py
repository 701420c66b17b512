"""Decides what runs next: admits requests from a fair queue, enforces limits, and plans the work of each step.

Imports no torch.
"""
