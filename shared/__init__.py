"""What the parent and its workers agree on: settings, errors, messages, checkpoints, chat templates.

Nothing here imports MLX, and nothing here imports `mlxpool.parent` or `mlxpool.worker`.
"""
