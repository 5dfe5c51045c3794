"""A GGUF file made into a model folder, with numpy alone: no MLX, so no GPU, and memory for some rows."""
