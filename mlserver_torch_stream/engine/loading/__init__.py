"""Loads models from files, once for all engines that share them, and places and checks them on their devices."""
