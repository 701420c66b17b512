"""Makes answers match a JSON schema, a regular expression or a grammar, token by token."""
