"""Captures decode steps as CUDA graphs, cut at the attentions, and replays them."""
