"""Decode steps recorded once and replayed: CUDA graphs between a model's attentions."""
