"""Finds the user's own model or script before anything starts, without running it or importing torch."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import logging
import re
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import NamedTuple

from vitscale.base.files import beside, read_text
from vitscale.base.plugins import target
from vitscale.errors import RequestError, nearest, shown
from vitscale.trial.model_spec import NAMED_MODELS, ModelSpec

_WEIGHTS = "model.safetensors"
"""File name of weights on the hub; several files are used only above 5 GB, which no named model reaches."""


def located(study_path: Path, model: ModelSpec) -> ModelSpec:
    """Return the model with absolute paths of folders, and the factory in place of an installed package's name.

    `hf` and `weights` are paths where they name folders beside the study file; else they stay names on the hub.
    """
    if model.name is not None and model.name not in NAMED_MODELS:
        factory = target("model", model.name)
        if factory:
            model = model.model_copy(update={"name": None, "factory": factory})
    update = {}
    if model.hf:
        update["hf"] = _folder_or_hub_name(study_path, model.hf)
    if model.weights:
        update["weights"] = _folder_or_hub_name(study_path, model.weights)
    return model.model_copy(update=update) if update else model


def _folder_or_hub_name(study_path: Path, name: str) -> str:
    """Return the absolute path of a folder beside the study file; where there is none, the name as it is."""
    folder = beside(study_path, name)
    try:
        return str(folder) if folder.is_dir() else name
    except OSError:  # a name too long for a file
        return name


def weights_digest(model: ModelSpec) -> str | None:
    """Return the SHA-256 of a located model's pretrained weights: of its config.json and all its safetensors files.

    Raises:
        RequestError: they are not there, not whole, or not in safetensors: other formats may run code when they are
            read.
    """
    if model.weights is None:
        return None
    folder = Path(model.weights)
    if not folder.is_absolute():
        return hashlib.sha256(_from_hub(model.weights, _WEIGHTS, "weights").read_bytes()).hexdigest()
    config = folder / "config.json"
    files = sorted(folder.glob("*.safetensors"))
    if not files or not config.is_file():
        missing = "config.json" if files else "file *.safetensors"
        raise RequestError(
            f"model.weights {shown(model.weights)} has no {missing}",
            next_step="Give a folder that `save_pretrained` of transformers wrote, or a name of the hub",
        )
    _refuse_lost_or_cut(model.weights, folder)
    digest = hashlib.sha256()
    for path in (config, *files):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _refuse_lost_or_cut(weights: str, folder: Path) -> None:
    """Refuse files that every rank would fail on: a shard that is not there, a download that broke off."""
    index = folder / f"{_WEIGHTS}.index.json"
    needed = {_WEIGHTS}
    if index.is_file() and not (folder / _WEIGHTS).is_file():
        text = read_text(index, "the index of model.weights", next_step="Get it again")
        needed = {*re.findall(r':\s*"([^"/]+\.safetensors)"', text)}
    for name in sorted(needed):
        path = folder / name
        if not path.is_file():
            fault = "is not there"
        elif not _is_whole(path):
            fault = "is cut off, or no such file (a pointer of Git LFS is none)"
        else:
            continue
        raise RequestError(f"model.weights {shown(weights)}: {name} {fault}", next_step="Get it again")


_HEADER_SIZE_BYTES = 8


def _is_whole(path: Path) -> bool:
    """Whether a safetensors file ends where its last tensor does.

    It holds the size of the header (8 bytes, little-endian), the header, and the tensors. The header says where each of
    these ends, counted from its own end.
    """
    file_bytes = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(_HEADER_SIZE_BYTES), "little")
        header = file.read(min(header_bytes, file_bytes)).decode(errors="replace")
    ends = [int(end) for end in re.findall(r'"data_offsets":\s*\[\s*\d+\s*,\s*(\d+)', header)]
    return _HEADER_SIZE_BYTES + header_bytes + max(ends, default=0) == file_bytes


def check(study_path: Path, model: ModelSpec) -> str | None:
    """Check that a located model is there.

    Returns:
        For `hf`, the SHA-256 of its config.json: all that decides which model is built, wherever its folder lies.

    Raises:
        RequestError: the folder has no configuration, the hub does not have it or cannot be reached, it is of a type
            that has no such head, or the factory's module or function does not exist.
    """
    if model.factory is not None:
        what = f"model.factory {shown(model.factory)}"
        check_reference(study_path, what, model.factory, arguments=("num_classes", "image_size"))
        return None
    if model.hf is None:
        return None
    folder = Path(model.hf)
    config = folder / "config.json" if folder.is_absolute() else _from_hub(model.hf, "config.json", "hf")
    text = read_text(config, "the configuration of model.hf,", next_step="Give a folder with a config.json")
    _check_type(model, text)
    return hashlib.sha256(text.encode()).hexdigest()


def factory_digest(study_path: Path, model: ModelSpec) -> str | None:
    """Return the SHA-256 of the file in which a model's factory stands, as the ranks find it.

    None where there is no factory, or no Python text of it.

    Modules that it imports are not in it.
    """
    if model.factory is None:
        return None
    spec = _spec_of(study_path, model.factory)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    text = read_text(Path(spec.origin), "the module of model.factory", next_step="Mend or remove it")
    return hashlib.sha256(text.encode()).hexdigest()


def _spec_of(study_path: Path, reference: str) -> ModuleSpec | None:
    """Return the specification of the module in "module:name", found where the ranks look for it."""
    module = _parse_reference(reference).module
    return _module_spec(module.split("."), _user_folders(study_path))


class _Reference(NamedTuple):
    """A name in a module, dotted where it lies in a class."""

    module: str
    name: str
    """Empty where the reference has none."""


def _parse_reference(reference: str) -> _Reference:
    """Read "module:name", or "module:name [extra]" as entry points may have it."""
    module, _, name = reference.partition("[")[0].strip().partition(":")
    return _Reference(module, name)


def _user_folders(study_path: Path) -> list[str]:
    """Return the folders in which ranks look for a user's modules, after what is installed."""
    return [str(Path.cwd()), str(study_path.parent.absolute())]


_HEADS = {"classification": "IMAGE_CLASSIFICATION", "segmentation": "SEMANTIC_SEGMENTATION"}


def _check_type(model: ModelSpec, config: str) -> None:
    """Refuse a model type for which the installed transformers has no such head; without it, refuse nothing."""
    match = re.search(r'"model_type"\s*:\s*"([\w.-]+)"', config)
    types_with_head = _types_with_head(_HEADS[model.task])
    if match is None or not types_with_head or match[1] in types_with_head:
        return
    model_type = match[1]
    raise RequestError(
        f"model.hf {shown(model.hf)} is of type {shown(model_type)}, for which transformers has no {model.task} of "
        "images",
        valid=types_with_head,
        hint=nearest(model_type, types_with_head),
        next_step="Name the configuration of such a model",
    )


def _types_with_head(head: str) -> list[str]:
    """Return the model types in transformers' own table; none without transformers.

    The table is read as text: importing it takes seconds, and torch.

    Args:
        head: as transformers' names of tables have it: "IMAGE_CLASSIFICATION".
    """
    transformers = importlib.util.find_spec("transformers")
    if transformers is None or not transformers.submodule_search_locations:
        return []
    file = Path(transformers.submodule_search_locations[0]) / "models" / "auto" / "modeling_auto.py"
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    table = text.partition(f"\nMODEL_FOR_{head}_MAPPING_NAMES = OrderedDict(")[2].partition("\n)")[0]
    # A type with its class, or with several classes in brackets of their own.
    return re.findall(r'\(\s*"([\w.-]+)",\s*(?:"[A-Z]|\()', table)


def _from_hub(name: str, file: str, key: str) -> Path:
    """Return a file from the hub, or from huggingface_hub's cache; `key` of [model] names it in messages.

    Raises:
        RequestError: the hub does not have it or cannot be reached, and it is not in the cache.
    """
    import huggingface_hub as hub

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it logs each try; one message is enough
    unreachable: Exception | None = None
    try:
        hub.get_hf_file_metadata(hub.hf_hub_url(name, file))
    except hub.errors.HfHubHTTPError:
        pass  # the hub answers: the download says what is wrong, and repeats what may pass
    except Exception as error:  # known at once, while the download would try for half a minute
        unreachable = error
    try:
        return Path(hub.hf_hub_download(name, file, local_files_only=unreachable is not None))
    except Exception as error:  # no network, no such model, no permission: the library has a class for each
        reason = " ".join(str(unreachable or error).split())[:300]
        what = f"model.{key} {shown(name)} is no folder beside the study file and cannot be had from the hub: {reason}"
        raise RequestError(what, next_step=f"Give a local folder with a {file}, or a name that exists there") from None


def script_digest(script: Path) -> str:
    """Return the SHA-256 of a training script.

    Raises:
        RequestError: it cannot be read, or is no Python.
    """
    text = read_text(script, "train.script", next_step="Give a path from the study file's folder")
    _parsed(text, f"train.script {shown(str(script))}")
    return hashlib.sha256(text.encode()).hexdigest()


def check_reference(
    study_path: Path, what: str, reference: str, methods: tuple[str, ...] = (), arguments: tuple[str, ...] = ()
) -> None:
    """Check that "module:name" is there and can be what the ranks take it for, as far as its text shows.

    Nothing is imported: that would bring torch, and the ranks may have another machine. What is imported into the
    module, inherited, decorated or compiled is left to them.

    Args:
        study_path: the study file, beside which ranks search too.
        what: what is referred to, for messages.
        reference: as an entry point has it.
        methods: those that it must have, if it is a class.
        arguments: names with which it is called, if it is a function.

    Raises:
        RequestError: it is not there, or cannot be that.
    """
    module, name = _parse_reference(reference)
    spec = _spec_of(study_path, reference)
    if spec is None:
        raise RequestError(
            f"{what}: there is no module {shown(module)}",
            next_step="Put it beside the study file or into the working directory, or install it",
        )
    if spec.origin is None or not spec.origin.endswith(".py") or not name:
        return  # compiled: only the rank can look inside
    source = Path(spec.origin)
    tree = _parsed(read_text(source, f"the module of {what},", next_step="Mend or remove it"), f"{what}: {source}")
    names = _names_in(tree)
    if "*" in names or "__getattr__" in names:
        return
    first_name = name.partition(".")[0]
    if first_name not in names:
        public_names = sorted(name for name in set(names) if not name.startswith("_"))
        shadowed = _module_spec_in(module.split("."), _user_folders(study_path))
        is_user_module_hidden = shadowed is not None and shadowed.origin != spec.origin
        raise RequestError(
            f"{what}: {spec.origin} has no {shown(first_name)}",
            valid=public_names[:_MOST_NAMES],
            next_step=_RENAME if is_user_module_hidden else "",
        )
    is_bound_once = name == first_name and names.count(name) == 1
    fault = _fault_of(tree, name, methods, arguments) if is_bound_once else ""
    if fault:
        raise RequestError(f"{what}: {shown(name)} in {spec.origin} {fault}")


_MOST_NAMES = 20
"""Names of a module that a message lists at most."""


def _fault_of(tree: ast.Module, name: str, methods: tuple[str, ...], arguments: tuple[str, ...]) -> str:
    """Return why what the module's own text calls `name` cannot be what is needed; empty where it may be.

    Example: "has no begin and no end".
    """
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and _assigns(node, name):
            return "is a constant"
        if not isinstance(node, ast.ClassDef | ast.FunctionDef) or node.name != name or node.decorator_list:
            continue
        lacking = _lacking_methods(node, methods) if isinstance(node, ast.ClassDef) else []
        if lacking:
            return f"has no {' and no '.join(lacking)}"
        lacking = _lacking_arguments(node, arguments) if isinstance(node, ast.FunctionDef) else []
        if lacking:
            noun = "keyword argument" if len(lacking) == 1 else "keyword arguments"
            return f"does not take the {noun} {' and '.join(lacking)}"
    return ""


def _assigns(node: ast.Assign, name: str) -> bool:
    return any(isinstance(assigned, ast.Name) and assigned.id == name for assigned in node.targets)


def _lacking_methods(node: ast.ClassDef, methods: tuple[str, ...]) -> list[str]:
    """Return the methods that a class does not have; none where it may inherit or make them."""
    names = _names_in(node)
    if node.bases or node.keywords or "__getattr__" in names:
        return []
    return [method for method in methods if method not in names]


def _lacking_arguments(node: ast.FunctionDef, arguments: tuple[str, ...]) -> list[str]:
    """Return the keyword arguments that a function does not take."""
    if node.args.kwarg is not None:
        return []
    parameters = [parameter.arg for parameter in (*node.args.args, *node.args.kwonlyargs)]
    return [argument for argument in arguments if argument not in parameters]


_RENAME = "A module of this name is installed, and comes before the study's own: give yours another name"


def _module_spec(parts: list[str], folders: list[str]) -> ModuleSpec | None:
    """Return the module's specification, found package by package without importing any, where ranks find it.

    They search what is installed, then the working directory, then the study file's folder.
    """
    spec = PathFinder.find_spec(parts[0], [*filter(None, sys.path), *folders])
    try:
        # Editable installations have finders of their own; looking up a top-level name imports nothing.
        spec = spec or importlib.util.find_spec(parts[0])
    except (ImportError, ValueError):
        return None
    return _submodule_spec(spec, parts)


def _module_spec_in(parts: list[str], folders: list[str]) -> ModuleSpec | None:
    """Return the module's specification in these folders alone."""
    return _submodule_spec(PathFinder.find_spec(parts[0], folders), parts)


def _submodule_spec(spec: ModuleSpec | None, parts: list[str]) -> ModuleSpec | None:
    """Return the specification of all of a dotted name, from that of its first part."""
    for part in parts[1:]:
        if spec is None or spec.submodule_search_locations is None:
            return None
        # By its last name: given the whole name, the finder would want the packages above to be imported.
        spec = PathFinder.find_spec(part, list(spec.submodule_search_locations))
    return spec


def _names_in(tree: ast.AST) -> list[str]:
    """Return every name to which a text gives a value, as often as it does; "*" for a star import."""
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            names.append(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.append(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                first_part = alias.name.partition(".")[0]
                names.append(alias.asname or first_part)
    return names


def _parsed(text: str, what: str) -> ast.Module:
    """Parse Python, called `what` in messages.

    Raises:
        RequestError: it is no Python.
    """
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise RequestError(f"{what}{line} is no Python: {error}") from None
