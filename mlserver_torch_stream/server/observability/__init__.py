"""What operators see: metrics, one log line and one span per request."""
