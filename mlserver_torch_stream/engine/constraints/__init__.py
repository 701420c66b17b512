"""Makes answers match a schema, an expression or a grammar, token by token."""
