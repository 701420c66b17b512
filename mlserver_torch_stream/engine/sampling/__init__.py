"""Samples the next token of each row from its logits."""
