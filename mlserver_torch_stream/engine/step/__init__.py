"""Runs the steps of an engine: batchers for continuous and serial batching, the choice of tokens, and drafts."""
