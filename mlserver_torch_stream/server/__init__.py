"""How stock MLServer is mended and extended. Never imports torch."""
