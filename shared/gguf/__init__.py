"""What a GGUF file says of itself, and what a model folder made of it would hold: read from headers alone.

`header` reads a file without trusting it, `parts` finds the files of one model, `plan` says which tensors and
which config.json they become. No weights are read here, so a configuration can be refused at once.
"""
