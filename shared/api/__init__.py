"""Request schemas, one module per protocol, with all of their validation."""
