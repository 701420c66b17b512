"""From loading to the end of the process: readiness, drain, who is still here."""
