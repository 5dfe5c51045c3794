"""What jobs' outputs may be called, and what their configurations name.

An output's name becomes a folder's name, so there is one strict rule for each kind of output; what exists
already is never written over. What a configuration names is looked up among what is there.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from mlxpool.parent import hints
from mlxpool.parent.library import MODELS_FOLDER, Library, LibraryModel
from mlxpool.shared import adapters, checkpoint
from mlxpool.shared.colibri.folder import is_only_streamed
from mlxpool.shared.config_values import is_model_name
from mlxpool.shared.errors import ApiError
from mlxpool.shared.files import open_regular
from mlxpool.shared.job_tasks import Trained
from mlxpool.shared.text import cut

from .kind import Fault, Here

MAX_NAME_CHARS = 96
# File systems hold 255 bytes of a name, and a stage's has a prefix.
MAX_NAME_BYTES = 200
DATASETS_FOLDER = "datasets"
DATASET_SUFFIX = ".jsonl"


def models_folder(here: Here) -> Path:
    return here.home / MODELS_FOLDER


def adapters_folder(here: Here) -> Path:
    return here.home / adapters.ADAPTERS_FOLDER


def last_part(name: str) -> str:
    """A model's name without its publisher: what names of outputs are made of."""
    return name.rpartition("/")[2]


def name_problem(name: str) -> str | None:
    """Why no model of ours can be called that, None where it can."""
    if (
        not is_model_name(name)
        or "/" in name
        or ":" in name
        or name != name.strip()
        or name.startswith("-")  # a command would take it for a flag
        or not name.isprintable()
        or len(name) > MAX_NAME_CHARS
        or len(name.encode()) > MAX_NAME_BYTES
    ):
        return (
            f"{cut(name)!r} can't be a model's name; use at most {MAX_NAME_CHARS} characters, "
            "without / \\ : * and what can't be seen, no dot or dash in front"
        )
    return None


def new_model_faults(name: str, here: Here) -> list[Fault]:
    """Why the name can't be a new model's."""
    problem = name_problem(name)
    if problem is not None:
        return [Fault("name", problem)]
    if here.library.find(name) is not None or os.path.lexists(models_folder(here) / name):
        remove = hints.command(f"rm {name}", here.home)
        return [Fault("name", f"there is a model {name!r} already; choose another name, or {remove} first")]
    return []


def new_adapter_faults(adapter: str, here: Here) -> list[Fault]:
    """Why the name can't be a new adapter's."""
    if not adapters.is_id(adapter) or len(adapter) > MAX_NAME_CHARS:
        return [Fault("name", f"{cut(adapter)!r} can't be an adapter's name; use {adapters.ID_RULE}")]
    folder = adapters_folder(here) / adapter
    if os.path.lexists(folder):
        return [
            Fault(
                "name",
                f"there is an adapter {adapter!r} already; choose another name, or remove {folder} first",
            )
        ]
    return []


def find_model(name: str, library: Library, adapted: bool = False) -> LibraryModel | Fault:
    """The model of that name or alias. adapted: whether the name may ask for adapters too, which only those
    who hand it on to the server's API see to."""
    try:
        found = library.resolved(name)
    except ApiError as problem:
        return Fault("model", problem.message)
    model, adapter = found.model, found.adapter
    if adapter in (None, adapters.NONE) or adapted:
        return model
    return Fault("model", f"{cut(name)!r} is {model.name!r} with an adapter; give {model.name!r} as it is")


def read_model(model: LibraryModel) -> checkpoint.Checkpoint | Fault:
    """What the model's files say."""
    try:
        if is_only_streamed(model.path):
            return Fault("model", f"{model.name}'s experts are streamed; this job needs a model in memory")
        found = checkpoint.read(model.path)
    except checkpoint.CheckpointError as problem:
        return Fault("model", f"{model.name} can't be loaded: {problem}")
    if found.config.get("model_file") is not None:
        return Fault("model", f"{model.name} wants code of its folder run, which is never done here")
    return found


def read_served(model: LibraryModel, here: Here) -> checkpoint.Checkpoint | Fault | None:
    """What the files say of a model that a job only asks through the server; None where its experts are
    streamed, which goes with no adapter."""
    try:
        if model.settings.experts != "stream" and not is_only_streamed(model.path):
            return read_model(model)
    except checkpoint.CheckpointError as problem:
        return Fault("model", f"{model.name} can't be loaded: {problem}")
    fault = here.library.describe(model, here.backend, None).fault
    return None if fault is None else Fault("model", f"{model.name} can't be loaded: {fault}")


def find_checkpoint(name: str, library: Library) -> checkpoint.Checkpoint | Fault:
    """What the files of the model of that name say: `find_model`, then `read_model`."""
    model = find_model(name, library)
    return model if isinstance(model, Fault) else read_model(model)


def find_adapter(
    adapter: str, found: checkpoint.Checkpoint | None, here: Here, field: str = "adapter"
) -> Trained | Fault:
    """An adapter of home/adapters, and whether it fits the model, as far as its files tell."""
    folder = adapters_folder(here) / adapter
    if not adapters.is_id(adapter) or not folder.is_dir():
        known = adapters.listing(adapters_folder(here))
        near = difflib.get_close_matches(cut(adapter), known, n=1, cutoff=0.5)
        advice = f"did you mean {near[0]}?" if near else adapters.some(known)
        return Fault(field, f"no adapter {cut(adapter)!r} here; {advice}")
    try:
        read = adapters.read(folder)
        if found is not None:
            fit = adapters.fit(read, found.tensors)
            if fit.fits is False:
                return Fault(field, f"{adapter} does not fit the model: {fit.reason}")
    except adapters.AdapterError as problem:
        return Fault(field, f"{adapter} can't be used: {problem}")
    return Trained(adapter, str(folder))


def find_lines(data: str, here: Here, field: str) -> Path | Fault:
    """A dataset of home/datasets by name, or a file by its absolute path."""
    if os.path.isabs(data):
        return find_file(data, field)
    datasets = here.home / DATASETS_FOLDER
    if is_model_name(data) and "/" not in data:
        path = datasets / f"{data.removesuffix(DATASET_SUFFIX)}{DATASET_SUFFIX}"
        if os.path.isfile(path):  # also for a name that no file could have
            return path
    try:
        known = sorted(entry.stem for entry in datasets.glob(f"*{DATASET_SUFFIX}"))
    except OSError:
        known = []
    near = difflib.get_close_matches(cut(data), known, n=1, cutoff=0.5)
    advice = f"did you mean {near[0]}?" if near else f"there are {', '.join(known[:8]) or 'none yet'}"
    return Fault(field, f"no dataset {cut(data)!r} here ({advice}); a file is named by its absolute path")


def find_file(file: str, field: str) -> Path | Fault:
    """A regular file by its absolute path."""
    path = Path(file)
    if not path.is_absolute():
        return Fault(field, f"{cut(file)!r} is no absolute path; begin it with /")
    try:
        with open_regular(path) as opened:
            size_bytes = os.fstat(opened.fileno()).st_size
    except (OSError, ValueError) as problem:
        why = problem.strerror if isinstance(problem, OSError) else "no path"
        return Fault(field, f"{cut(file)!r} can't be read: {why}")
    if not size_bytes:
        # So are the kernel's files, reading which may wait for ever.
        return Fault(field, f"{cut(file)!r} is empty")
    return path
