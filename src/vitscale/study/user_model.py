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

from vitscale.base.files import path_named_in, read_text
from vitscale.base.plugins import target
from vitscale.errors import RequestError, nearest, shown
from vitscale.study import library_models, model_names
from vitscale.trial.model_spec import NAMED_MODELS, ModelSpec

_WEIGHTS_FILE = "model.safetensors"
"""File name of weights on the hub; several files are used only above 5 GB, which no named model reaches."""


def with_located_files(
    study_path: Path, model: ModelSpec, source: model_names.NameSource = model_names.IN_STUDY
) -> ModelSpec:
    """Return the model with its name resolved to a factory, and its folders to absolute paths.

    A name that an installed package offers is replaced by the factory that it stands for, and that of a folder or of
    the hub by `hf`; a name of timm or torchvision gets its library in front. `hf` and `weights` become absolute paths
    where they name folders beside the study file, or `weights` a file; else they stay names on the hub. `source` is
    where the name stands, for messages.

    Raises:
        RequestError: there is no model of this name, or several that it can mean.
    """
    changes: dict[str, str | None] = {}
    if model.name is not None and model.name not in NAMED_MODELS:
        changes |= _fields_of_name(study_path, model, source)
    if model.hf:
        changes["hf"] = _folder_or_hub_name(study_path, model.hf)
    if model.weights:
        changes["weights"] = _folder_or_hub_name(study_path, model.weights)
    return model.model_copy(update=changes) if changes else model


def _fields_of_name(study_path: Path, model: ModelSpec, source: model_names.NameSource) -> dict[str, str | None]:
    """Return the fields that a name stands for which is not one of vitscale's own."""
    name = model.name or ""
    factory = target("model", name)
    if factory:
        return {"name": None, "factory": factory}
    if model.hf is not None or model.factory is not None:
        return {}  # more than one of the three, which is refused as such
    meaning = model_names.meaning(study_path, name, source)
    return {"name": meaning.name, "hf": meaning.hf}


def _folder_or_hub_name(study_path: Path, name: str) -> str:
    """Return the absolute path of a folder or safetensors file beside the study file; else the name as it is."""
    path = path_named_in(study_path, name)
    is_weights_file = path.suffix == ".safetensors"
    try:
        return str(path) if path.is_dir() or (is_weights_file and path.is_file()) else name
    except OSError:  # a name too long for a file
        return name


def weights_digest(model: ModelSpec) -> str | None:
    """Return a digest of a located model's pretrained weights; None where it begins with random ones.

    Weights of the hub are one file, and the digest is the SHA-256 of its content. Those in a folder are several files:
    first config.json, then all safetensors files in the order of their names. Their digest is the SHA-256 of the
    SHA-256 digests of these files, one behind the other.

    Args:
        model: the model as `with_located_files` returns it: the path of a folder is absolute, a name of the hub is not.

    Raises:
        RequestError: the weights are not there, not whole, or not in safetensors. Other formats are refused because
            they may run code when they are read.
    """
    if model.weights is None:
        return None
    _check_format_of_weights(model, model.weights)
    folder = Path(model.weights)
    is_on_hub = not folder.is_absolute()
    if is_on_hub:
        downloaded = _hub_file(model.weights, _WEIGHTS_FILE, "model.weights")
        return hashlib.sha256(downloaded.read_bytes()).hexdigest()
    digest_of_all = hashlib.sha256()
    for path in _checked_weights_files(model.weights, folder, needs_config=model.library is None):
        with path.open("rb") as file:
            digest_of_all.update(hashlib.file_digest(file, "sha256").digest())
    return digest_of_all.hexdigest()


def _check_format_of_weights(model: ModelSpec, weights: str) -> None:
    """Refuse weights in a form that a model of this kind does not take.

    Raises:
        RequestError: a single file for a model of transformers, a name on the hub for a model of torchvision, or a file
            in another format than safetensors, which may run code when it is read.
    """
    path = Path(weights)
    is_file = path.is_absolute() and path.is_file()
    has_suffix_of_file = path.suffix in (".pth", ".pt", ".bin", ".ckpt", ".npz")
    if has_suffix_of_file:
        raise RequestError(
            f"model.weights {shown(weights)} is no safetensors file",
            next_step="Save the weights with safetensors.torch.save_file, and name that file",
        )
    if model.library is None and is_file:
        raise RequestError(
            f"model.weights {shown(weights)} is a file, and these weights need their config.json beside them",
            next_step="Give the folder that `save_pretrained` of transformers wrote",
        )
    if model.library is not None and model.library.library == "torchvision" and not path.is_absolute():
        raise RequestError(
            f"model.weights {shown(weights)} is no safetensors file or folder beside the study file",
            next_step="Save torchvision's weights with safetensors.torch.save_file, and name that file",
        )


def _checked_weights_files(weights: str, folder: Path, *, needs_config: bool) -> list[Path]:
    """Return config.json and all safetensors files of a folder, after a check that they are there and whole.

    Args:
        weights: the folder as model.weights names it, for messages.
        folder: the folder, or for a model of timm or torchvision also a file.
        needs_config: whether config.json must be there; where it need not be, it is not returned.

    Raises:
        RequestError: a file is missing or cut off.
    """
    config = folder / "config.json"
    tensor_files = [folder] if folder.is_file() else sorted(folder.glob("*.safetensors"))
    lacks_config = needs_config and not config.is_file()
    if not tensor_files or lacks_config:
        missing = "config.json" if tensor_files else "file *.safetensors"
        writer = "`save_pretrained` of transformers" if needs_config else "safetensors.torch.save_file"
        raise RequestError(
            f"model.weights {shown(weights)} has no {missing}",
            next_step=f"Give a folder that {writer} wrote, or a name of the hub",
        )
    needed_files = [folder / name for name in _needed_tensor_files(folder)] if needs_config else tensor_files
    for path in needed_files:
        fault = _fault_of_tensor_file(path)
        if fault is not None:
            raise RequestError(f"model.weights {shown(weights)}: {path.name} {fault}", next_step="Get it again")
    return [config, *tensor_files] if needs_config else tensor_files


def _needed_tensor_files(folder: Path) -> list[str]:
    """Return the names of the safetensors files that ranks will read from a folder, in order.

    They are the files that the folder's index lists, or model.safetensors where that is there or there is no index.
    """
    index = folder / f"{_WEIGHTS_FILE}.index.json"
    if (folder / _WEIGHTS_FILE).is_file() or not index.is_file():
        return [_WEIGHTS_FILE]
    text = read_text(index, "the index of model.weights", next_step="Get it again")
    # Lines such as "encoder.weight": "model-00001-of-00002.safetensors".
    return sorted(set(re.findall(r':\s*"([^"/]+\.safetensors)"', text)))


def _fault_of_tensor_file(path: Path) -> str | None:
    """Return why every rank would fail on a safetensors file; None where it is whole."""
    if not path.is_file():
        return "is not there"
    if not _is_whole(path):
        return "is cut off, or no such file (a pointer of Git LFS is none)"
    return None


_HEADER_SIZE_BYTES = 8


def _is_whole(path: Path) -> bool:
    """Whether a safetensors file ends where its last tensor does.

    The file holds the size of the header (8 bytes, little-endian), the header, and the tensors. The header is JSON with
    the start and the end of each tensor, in bytes from the header's end: "data_offsets": [0, 3072].
    """
    file_bytes = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(_HEADER_SIZE_BYTES), "little")
        header = file.read(min(header_bytes, file_bytes)).decode(errors="replace")
    tensor_ends = [int(end) for end in re.findall(r'"data_offsets":\s*\[\s*\d+\s*,\s*(\d+)', header)]
    tensor_bytes = max(tensor_ends, default=0)
    return _HEADER_SIZE_BYTES + header_bytes + tensor_bytes == file_bytes


def check(study_path: Path, model: ModelSpec, field: str = "model.hf") -> str | None:
    """Check that the files of a located model are there, and return the digest of its configuration.

    Args:
        study_path: the study file.
        model: the model as `with_located_files` returns it.
        field: where the model is named, for messages: "model.hf", "model.name", or "--model".

    Returns:
        For `hf` the SHA-256 of its config.json, which alone decides the model that is built. None for other models.

    Raises:
        RequestError: the folder has no configuration; the hub does not have it or cannot be reached; transformers has
            no model of this type for the task; or the factory's module or function does not exist.
    """
    if model.factory is not None:
        what = f"model.factory {shown(model.factory)}"
        check_reference(study_path, what, model.factory, arguments=("num_classes", "image_size"))
        return None
    if model.library is not None:
        library_models.check_installed(model.library, "model.name" if field == "model.hf" else field)
    if model.hf is None:
        return None
    folder = Path(model.hf)
    config = folder / "config.json" if folder.is_absolute() else _hub_file(model.hf, "config.json", field)
    text = read_text(config, f"the configuration of {field},", next_step="Give a folder with a config.json")
    _check_type(model, text, what=f"{field} {shown(model.hf)}")
    return hashlib.sha256(text.encode()).hexdigest()


def factory_digest(study_path: Path, model: ModelSpec) -> str | None:
    """Return the SHA-256 of the Python file in which a model's factory stands.

    The file is the one that the ranks will import; modules that it imports itself do not count. Return None where the
    model has no factory, or where its module is no Python file.
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
    return _module_spec(module.split("."), user_folders(study_path))


class _Reference(NamedTuple):
    """A name in a module, dotted where it lies in a class."""

    module: str
    name: str
    """Empty where the reference has none."""


def _parse_reference(reference: str) -> _Reference:
    """Read "module:name", or "module:name [extra]" as entry points may have it."""
    module, _, name = reference.partition("[")[0].strip().partition(":")
    return _Reference(module, name)


def user_folders(study_path: Path) -> list[str]:
    """Return the folders in which ranks look for a user's modules, after what is installed."""
    return [str(Path.cwd()), str(study_path.parent.absolute())]


_HEAD_BY_TASK = {"classification": "IMAGE_CLASSIFICATION", "segmentation": "SEMANTIC_SEGMENTATION"}
_BACKBONES = {"classification": ("IMAGE", "BACKBONE"), "segmentation": ("BACKBONE",)}
"""Tables of types on which vitscale puts a head itself: a linear one, or UperNet."""
_OTHER_INPUTS = {
    "siglip2": "patches of images in any proportions (fixed sizes of SigLIP 2 are of type 'siglip')",
    "siglip2_vision_model": "patches of images in any proportions (fixed sizes of SigLIP 2 are of type 'siglip')",
    "timesformer": "videos",
    "videomae": "videos",
    "videoprism_vision_model": "videos",
    "vivit": "videos",
}
"""Types of models whose forward takes something else than images [b, channels, height, width]."""
_TYPES_OF_TIMM = ("timm_wrapper", "timm_backbone")
_KEYS_OF_VISION = re.compile(r'"(?:vision_config|image_size|num_channels)"\s*:')


def _check_type(model: ModelSpec, config: str, what: str) -> None:
    """Refuse a model of a type that cannot be trained for the task with the installed transformers.

    A type is taken that transformers has a head of the task for, or on whose backbone a head can be put. Nothing is
    refused where transformers is not installed.

    Args:
        model: the model, with `hf`.
        config: text of its config.json.
        what: the model, for messages: "model.hf 'facebook/dinov2-base'".
    """
    match = re.search(r'"model_type"\s*:\s*"([\w.-]+)"', config)
    types_with_head = _types_in_table(f"FOR_{_HEAD_BY_TASK[model.task]}_MAPPING")
    if match is None or not types_with_head:
        return
    model_type = match[1]
    _check_inputs(what, model_type)
    if model_type in types_with_head or _has_backbone(model, model_type, config):
        return
    raise RequestError(
        f"{what} is of type {shown(model_type)}, for which transformers has no {model.task} of images",
        valid=types_with_head,
        hint=nearest(model_type, types_with_head),
        next_step="Name the configuration of such a model",
    )


def _check_inputs(what: str, model_type: str) -> None:
    """Refuse types whose forward does not take images, and types that need timm where it is not installed."""
    if model_type in _OTHER_INPUTS:
        raise RequestError(
            f"{what} is of type {shown(model_type)}, which takes {_OTHER_INPUTS[model_type]}",
            next_step="Name the configuration of a model that takes images",
        )
    if model_type in _TYPES_OF_TIMM and not library_models.is_installed("timm"):
        raise RequestError(
            f"{what} is of type {shown(model_type)} and needs timm, which is not installed",
            next_step=library_models.install_step("timm"),
        )


def _has_backbone(model: ModelSpec, model_type: str, config: str) -> bool:
    """Whether vitscale can put a head for the task on a model of this type.

    For classification any model will do that takes images: one in transformers' table of such models, or one whose
    configuration has an image's size or channels, or a vision tower.
    """
    for table in _BACKBONES[model.task]:
        if model_type in _types_in_table(f"FOR_{table}_MAPPING"):
            return True
    is_classification = model.task == "classification"
    has_images = "vision" in model_type or _KEYS_OF_VISION.search(config) is not None
    return is_classification and has_images and model_type in _types_in_table("MAPPING")


def _types_in_table(table: str) -> list[str]:
    """Return the model types in one of transformers' own tables; none without transformers.

    The table is read as text: importing it takes seconds, and torch.

    Args:
        table: as transformers has it between MODEL_ and _NAMES: "FOR_IMAGE_CLASSIFICATION_MAPPING".
    """
    body = _auto_models().partition(f"\nMODEL_{table}_NAMES = OrderedDict(")[2].partition("\n)")[0]
    # A type with its class, or with several classes in brackets of their own.
    return re.findall(r'\(\s*"([\w.-]+)",\s*(?:"[A-Z]|\()', body)


def _auto_models() -> str:
    """Return the source of transformers' tables of models; empty where it is not installed."""
    transformers = importlib.util.find_spec("transformers")
    if transformers is None or not transformers.submodule_search_locations:
        return ""
    file = Path(transformers.submodule_search_locations[0]) / "models" / "auto" / "modeling_auto.py"
    return file.read_text(encoding="utf-8") if file.is_file() else ""


def _hub_file(name: str, file: str, field: str) -> Path:
    """Return a file from the hub, or from huggingface_hub's cache; `field` names it in messages.

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
        place = "here" if field.startswith("--") else "beside the study file"
        what = f"{field} {shown(name)} is no folder {place} and cannot be had from the hub: {reason}"
        raise RequestError(what, next_step=f"Give a local folder with a {file}, or a name that exists there") from None


def script_digest(script: Path) -> str:
    """Return the SHA-256 of a training script.

    Raises:
        RequestError: it cannot be read, or is no Python.
    """
    text = read_text(script, "train.script", next_step="Give a path from the study file's folder")
    _parsed_python(text, f"train.script {shown(str(script))}")
    return hashlib.sha256(text.encode()).hexdigest()


def check_reference(
    study_path: Path, what: str, reference: str, methods: tuple[str, ...] = (), arguments: tuple[str, ...] = ()
) -> None:
    """Check that "module:name" exists and can be used as the ranks will use it, as far as the module's text shows.

    Nothing is imported, because that would import torch, and because the ranks may run on another machine. So a name
    is not checked further where the module imports it or is compiled, or where it is inherited or decorated.

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
    text = read_text(source, f"the module of {what},", next_step="Mend or remove it")
    tree = _parsed_python(text, f"{what}: {source}")
    names_in_module = _all_names_in(tree)
    may_have_other_names = "*" in names_in_module or "__getattr__" in names_in_module
    if may_have_other_names:
        return
    first_name = name.partition(".")[0]  # "Classes" of "Classes.build"
    if first_name not in names_in_module:
        raise RequestError(
            f"{what}: {spec.origin} has no {shown(first_name)}",
            valid=_public_names(names_in_module)[:_MOST_NAMES_LISTED],
            next_step=_RENAME_ADVICE if _is_user_module_hidden(study_path, module, by=spec) else "",
        )
    is_defined_once = name == first_name and names_in_module.count(name) == 1
    fault = _fault_of_definition(tree, name, methods, arguments) if is_defined_once else ""
    if fault:
        raise RequestError(f"{what}: {shown(name)} in {spec.origin} {fault}")


def _is_user_module_hidden(study_path: Path, module: str, *, by: ModuleSpec) -> bool:
    """Whether a user's folder has a module of this name too, which ranks will not import because `by` comes first."""
    user_module = _module_spec_in(module.split("."), user_folders(study_path))
    return user_module is not None and user_module.origin != by.origin


def _public_names(names: list[str]) -> list[str]:
    """Return the names that do not begin with an underscore, each once, in alphabetical order."""
    return sorted(name for name in set(names) if not name.startswith("_"))


_MOST_NAMES_LISTED = 20
"""Names of a module that a message lists at most."""


def _fault_of_definition(tree: ast.Module, name: str, methods: tuple[str, ...], arguments: tuple[str, ...]) -> str:
    """Return why the constant, class or function `name` of a module cannot be used; empty where it may be.

    Example: "has no begin and no end".

    Args:
        tree: the module.
        name: the name, which the module defines once.
        methods: methods that it must have, if it is a class.
        arguments: keyword arguments that it must take, if it is a function.
    """
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and _assigns(node, name):
            return "is a constant"
        if not isinstance(node, ast.ClassDef | ast.FunctionDef) or node.name != name:
            continue
        if node.decorator_list:
            continue  # what the decorator makes of it is not known
        if isinstance(node, ast.ClassDef):
            lacking_methods = _lacking_methods(node, methods)
            if lacking_methods:
                return f"has no {' and no '.join(lacking_methods)}"
        else:
            lacking_arguments = _lacking_arguments(node, arguments)
            if lacking_arguments:
                noun = "keyword argument" if len(lacking_arguments) == 1 else "keyword arguments"
                return f"does not take the {noun} {' and '.join(lacking_arguments)}"
    return ""


def _assigns(node: ast.Assign, name: str) -> bool:
    """Whether an assignment gives a value to a variable of this name."""
    return any(isinstance(assigned, ast.Name) and assigned.id == name for assigned in node.targets)


def _lacking_methods(node: ast.ClassDef, methods: tuple[str, ...]) -> list[str]:
    """Return the methods that a class does not have; none where it may inherit or make them."""
    names = _all_names_in(node)
    if node.bases or node.keywords or "__getattr__" in names:
        return []
    return [method for method in methods if method not in names]


def _lacking_arguments(node: ast.FunctionDef, arguments: tuple[str, ...]) -> list[str]:
    """Return the keyword arguments that a function does not take."""
    if node.args.kwarg is not None:
        return []
    parameters = [parameter.arg for parameter in (*node.args.args, *node.args.kwonlyargs)]
    return [argument for argument in arguments if argument not in parameters]


_RENAME_ADVICE = "A module of this name is installed, and comes before the study's own: give yours another name"


def _module_spec(parts: list[str], folders: list[str]) -> ModuleSpec | None:
    """Return the specification of the module that ranks will import; None where there is none.

    Ranks search what is installed, then the working directory, then the study file's folder. The module is found
    package by package, and nothing is imported.

    Args:
        parts: the module's dotted name in parts: ["my_models", "vit"].
        folders: the two folders, in this order.
    """
    top_package = parts[0]
    spec = PathFinder.find_spec(top_package, [*filter(None, sys.path), *folders])
    if spec is None:
        try:
            # Editable installations have finders of their own; looking up a top-level name imports nothing.
            spec = importlib.util.find_spec(top_package)
        except (ImportError, ValueError):
            return None
    return _submodule_spec(spec, parts)


def _module_spec_in(parts: list[str], folders: list[str]) -> ModuleSpec | None:
    """Return the module's specification in these folders alone."""
    return _submodule_spec(PathFinder.find_spec(parts[0], folders), parts)


def _submodule_spec(spec: ModuleSpec | None, parts: list[str]) -> ModuleSpec | None:
    """Return the specification of a module from that of its outermost package; None where it does not exist.

    Args:
        spec: specification of `parts[0]`; None where that does not exist.
        parts: the module's dotted name in parts.
    """
    for part in parts[1:]:
        if spec is None or spec.submodule_search_locations is None:
            return None
        # By its last name: given the whole name, the finder would want the packages above to be imported.
        spec = PathFinder.find_spec(part, list(spec.submodule_search_locations))
    return spec


def _all_names_in(tree: ast.AST) -> list[str]:
    """Return the names of all functions, classes, variables and imports in a tree, at any depth; "*" for a star import.

    A name that is defined twice stands in the list twice.
    """
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


def _parsed_python(text: str, what: str) -> ast.Module:
    """Parse Python, called `what` in messages.

    Raises:
        RequestError: it is no Python.
    """
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise RequestError(f"{what}{line} is no Python: {error}") from None
