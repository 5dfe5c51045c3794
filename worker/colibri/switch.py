"""What stands in a model where its routed experts belong."""

from __future__ import annotations

import mlx.core as mx
from mlx import nn

from mlxpool.worker.colibri.experts import Activation
from mlxpool.worker.colibri.passes import Layer


class StreamedSwitchGLU(nn.Module):  # type: ignore[misc]  # mlx has no types here
    """Called as mlx-lm's SwitchGLU is, and gives what it gives. It has no parameters."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self._layer = layer

    @property
    def activation(self) -> Activation:
        """Of the module that was here first: experts may be put here anew."""
        return self._layer.activation

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        """x [B, T, D], indices [B, T, K]: [B, T, K, D]. Raises ReadFault, Interrupted."""
        return self._layer(x, indices)
