"""Captures decode steps as CUDA graphs, one for each number of sequences, and replays them."""
