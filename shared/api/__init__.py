"""Request schemas, one module per protocol, and the readers of values that they share."""
