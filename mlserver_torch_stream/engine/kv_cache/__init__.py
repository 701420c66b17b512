"""Keys, values and states of rows, and those kept of earlier prompts."""
