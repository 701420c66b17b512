"""The page at ``/``: its files, which are in ``files/``, and its routes."""
