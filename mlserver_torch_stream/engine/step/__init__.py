"""Runs the steps of an engine: the interface of batchers, continuous and serial batching, choice of tokens, drafts."""
