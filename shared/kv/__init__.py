"""The prompt cache on disk, as parent and workers see it: names, files, folders, the byte budget. No MLX."""
