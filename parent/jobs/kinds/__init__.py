"""The kinds of job there are. A new one is a module here and a line in `KINDS`."""

from __future__ import annotations

from .colibri_convert import ColibriConvert
from .dataset import Dataset
from .evaluate import Evaluate
from .finetune import Finetune
from .fuse import Fuse
from .import_ import Import
from .kind import Kind
from .pull import Pull
from .quantize import Quantize

# The order is that of forms and documents.
KINDS: tuple[Kind, ...] = (
    Pull(),
    Import(),
    Quantize(),
    Finetune(),
    Fuse(),
    Evaluate(),
    Dataset(),
    ColibriConvert(),
)  # fmt: skip
