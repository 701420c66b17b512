"""Tensor parallel: ranks that hold a part of every layer. The first one runs the engine, the others do as it does."""
