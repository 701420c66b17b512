"""The page at ``/``: what it consists of, and its routes. Its files are those of ``files/``."""
