"""Which request runs next: admission, the waiting queue, limits, and the work of each step. Imports no torch."""
