"""The MLX thread: admit, prefill in chunks, decode in a continuous batch, emit events.

One thread owns every mx call of the worker, the weights included: MLX binds arrays and streams to the
thread that made them. What can be decided without MLX (which row is prefilled next, how wide a chunk is,
whether another row fits) is decided in pure modules beside it: `chunks`, `admission`.
"""
