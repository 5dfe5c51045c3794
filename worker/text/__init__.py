"""From token ids to what a client reads: detokenise, cut at stop strings, emit typed events.

Pure: no MLX, no event loop, no HTTP. Each row of the batch owns one of each of these objects; only the
engine thread touches them.
"""
