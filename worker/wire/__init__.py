"""Events to bytes, one writer per protocol. Pure: no sockets, no MLX."""
