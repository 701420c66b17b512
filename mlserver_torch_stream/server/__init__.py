"""Patches and extends stock MLServer. Never imports torch."""
