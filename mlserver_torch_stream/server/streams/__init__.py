"""Messages of one stream, and the V2 answers to them."""
