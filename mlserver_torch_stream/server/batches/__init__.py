"""Batches in a server: rows that give way to the requests of clients, and the service that runs the batches."""
