"""Datasets of Hugging Face's library: what was saved is read, by the columns that are images and classes."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from image_files import cache, encoded, seen
from vitscale import sources
from vitscale.base.distribution import install_command
from vitscale.errors import RequestError
from vitscale.trial.trial import DataSpec

__all__ = ["cache"]

datasets = pytest.importorskip("datasets", reason="pip install 'vitscale[hf]'")


def spec(hf: Path | str, **keys: Any) -> DataSpec:
    return DataSpec(hf=str(hf), **{"source_size": 8, "held_out": 0.25, **keys})


def table(colours: list[tuple[int, int]], **extra: list[Any]) -> Any:
    """Rows of label and green; red is the label."""
    rows = {
        "picture": [
            {"bytes": encoded(Image.new("RGB", (9, 9), (label, green, 0))), "path": None} for label, green in colours
        ],
        "kind": [label for label, _ in colours],
    } | extra
    features = {"picture": datasets.Image(), "kind": datasets.ClassLabel(names=["zebra", "ant", "cow"])}
    return datasets.Dataset.from_dict(rows, datasets.Features(features | {k: datasets.Value("int64") for k in extra}))


TRAIN = [(n % 3, n) for n in range(12)]
TEST = [(n % 3, 100 + n) for n in range(3)]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf") / "säved images"
    datasets.DatasetDict({"train": table(TRAIN), "test": table(TEST)}).save_to_disk(str(folder))
    return folder


def test_a_saved_dataset_keeps_its_labels_and_splits(both: Path) -> None:
    for source in ("jpeg", "cache"):
        dataset = sources.load(spec(both, source=source))
        assert dataset.summary.classes == ("zebra", "ant", "cow")
        assert seen(dataset.train) == {(label, label, green) for label, green in TRAIN}
        assert seen(dataset.held_out) == {(label, label, green) for label, green in TEST}
        assert sources.check(spec(both, source=source)) == dataset.summary


def test_processes_read_the_saved_table(both: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitscale.sources.decoding.FEWEST_FOR_PROCESSES", 1)
    sources.prepare(spec(both))
    assert seen(sources.load(spec(both)).train) == {(label, label, green) for label, green in TRAIN}


def test_named_classes_and_a_split_by_share(both: Path, tmp_path: Path) -> None:
    some = sources.load(spec(both, classes=("cow", "ant")))
    assert some.summary.classes == ("ant", "cow")
    assert seen(some.train) == {({1: 0, 2: 1}[label], label, green) for label, green in TRAIN if label}
    table(TRAIN).save_to_disk(str(tmp_path / "one"))
    one = sources.check(spec(tmp_path / "one"))
    assert (one.train_samples, one.held_out_samples) == (9, 3)


def test_labels_keep_their_order_and_their_names_in_each_split(tmp_path: Path) -> None:
    """Numbers without names are in their own order; a class that the training lacks moves no other; a held-out split
    that numbers its classes in another way is read by its own names."""
    numbers = table(TRAIN).cast_column("kind", datasets.Value("int64"))
    numbers = numbers.map(lambda row: {"kind": row["kind"] * 5})
    numbers.save_to_disk(str(tmp_path / "numbers"))
    assert sources.check(spec(tmp_path / "numbers", columns=("picture", "kind"))).classes == ("0", "5", "10")
    some = table([each for each in TRAIN if each[0] != 1])
    turned = table([(2, 7), (0, 8)]).cast_column("kind", datasets.Value("int64"))
    turned = turned.cast_column("kind", datasets.ClassLabel(names=["cow", "ant", "zebra"]))
    datasets.DatasetDict({"train": some, "test": turned}).save_to_disk(str(tmp_path / "some"))
    dataset = sources.load(spec(tmp_path / "some"))
    assert dataset.summary.classes == ("zebra", "cow")
    assert seen(dataset.held_out) == {(0, 2, 7), (1, 0, 8)}


def test_a_held_out_split_with_other_classes_or_none_is_refused(tmp_path: Path) -> None:
    """Its images were left out unsaid; those of named classes may be."""
    some = table([each for each in TRAIN if each[0] != 1])
    datasets.DatasetDict({"train": some, "test": table(TEST)}).save_to_disk(str(tmp_path / "other"))
    with pytest.raises(RequestError, match="holds out the class 'ant', which is not among the training classes"):
        sources.check(spec(tmp_path / "other"))
    assert sources.check(spec(tmp_path / "other", classes=("cow", "zebra"))).held_out_samples == 2
    datasets.DatasetDict({"train": table(TRAIN), "test": table(TEST).remove_columns("kind")}).save_to_disk(
        str(tmp_path / "none")
    )
    with pytest.raises(RequestError, match=r"has no column 'kind'\. Valid: picture"):
        sources.check(spec(tmp_path / "none"))


@pytest.mark.parametrize(("hf", "asked"), [("me/tiny", ("me/tiny", None)), ("me/tiny:small", ("me/tiny", "small"))])
def test_a_name_of_the_hub_and_its_configuration(
    hf: str, asked: tuple[str, str | None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The library fetches it; what it tells of each try is kept out of the one message."""
    names = []

    def fetched(*name: str | None) -> Any:
        names.append(name)
        logging.getLogger("huggingface_hub.utils._http").warning("Retrying in 1s [Retry 1/5].")
        return datasets.DatasetDict({"train": table(TRAIN), "test": table(TEST)})

    monkeypatch.setattr(datasets, "load_dataset", fetched)
    dataset = sources.load(spec(hf, source="jpeg"))
    assert names == [asked]
    assert seen(dataset.train) == {(label, label, green) for label, green in TRAIN}
    assert not caplog.records


def test_parquet_files_in_a_folder(tmp_path: Path) -> None:
    table(TRAIN).to_parquet(str(tmp_path / "files" / "train.parquet"))
    table(TEST).to_parquet(str(tmp_path / "files" / "test.parquet"))
    dataset = sources.load(spec(tmp_path / "files"))
    assert seen(dataset.train) == {(label, label, green) for label, green in TRAIN}
    assert len(dataset.held_out) == 3


def test_columns_are_said_where_several_could_be_meant(tmp_path: Path) -> None:
    several = table(TRAIN).add_column("size", [n // 6 for n in range(12)])
    several = several.cast_column("size", datasets.ClassLabel(names=["small", "large"]))
    several.save_to_disk(str(tmp_path / "x"))
    with pytest.raises(RequestError, match=r"has 1 columns of images and 2 of classes\. Valid: kind, picture, size"):
        sources.check(spec(tmp_path / "x"))
    assert sources.check(spec(tmp_path / "x", columns=("picture", "size"))).classes == ("small", "large")
    with pytest.raises(RequestError, match=r"has no column 'pictures'\. Valid: kind"):
        sources.check(spec(tmp_path / "x", columns=("pictures", "size")))


def test_broken_rows_are_named(tmp_path: Path) -> None:
    rows = [{"bytes": encoded(Image.new("RGB", (9, 9))), "path": "a.png"} for _ in range(6)]
    rows[2] = {"bytes": b"no image", "path": "b.jpg"}
    rows[4] = None  # type: ignore[call-overload]  # what must be refused
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("string")})
    saved = datasets.Dataset.from_dict({"image": rows, "label": ["x", "y"] * 3}, features)
    saved.save_to_disk(str(tmp_path / "x"))
    with pytest.raises(
        RequestError, match=r"2 images are broken: '.*x row 4\.png' \(it has no.*row 2\.jpg' \(not an image"
    ):
        sources.check(spec(tmp_path / "x"))
    assert sources.check(spec(tmp_path / "x", skip_broken=2)).classes == ("x", "y")


@pytest.mark.parametrize("content", [None, "state.json", "dataset_dict.json", "x.parquet"])
def test_what_is_no_dataset_is_one_message(tmp_path: Path, content: str | None, monkeypatch: Any) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    (tmp_path / "x").mkdir()
    if content is not None:
        (tmp_path / "x" / content).write_text("{")
    with pytest.raises(RequestError, match=r"data\.hf '.*x' cannot be loaded: "):
        sources.check(spec(tmp_path / "x"))


@pytest.mark.parametrize("form", ["torch", "numpy", "arrow", "pandas"])
@pytest.mark.parametrize("columns", [None, ["kind"]])
def test_a_format_that_was_saved_with_a_dataset_changes_nothing(
    tmp_path: Path, form: str, columns: list[str] | None
) -> None:
    table(TRAIN).with_format(form, columns=columns).save_to_disk(str(tmp_path / "x"))
    dataset = sources.load(spec(tmp_path / "x", held_out=0.01, source="jpeg"))
    images = seen(dataset.train) | seen(dataset.held_out)
    assert images == {(label, label, green) for label, green in TRAIN}


def with_paths(folder: Path, paths: list[str]) -> Path:
    """A dataset whose rows name files. The library would put their content in, so the rows are written as they are."""
    rows = {"picture": [{"bytes": None, "path": path} for path in paths], "kind": [n % 2 for n in range(len(paths))]}
    features = {"picture": datasets.Image(decode=False), "kind": datasets.ClassLabel(names=["x", "y"])}
    saved = datasets.Dataset.from_dict(rows, datasets.Features(features))
    folder.mkdir(parents=True, exist_ok=True)
    with datasets.arrow_writer.ArrowWriter(features=saved.features, path=str(folder / "data.arrow")) as writer:
        for row in saved:
            writer.write(row)
        writer.finalize()
    plain = datasets.Dataset.from_file(str(folder / "data.arrow"))
    state: dict[str, Any] = {
        "_data_files": [{"filename": "data.arrow"}], "_fingerprint": "0123456789abcdef", "_format_columns": None,
        "_format_kwargs": {}, "_format_type": None, "_output_all_columns": False, "_split": None,
    }  # fmt: skip
    (folder / "state.json").write_text(json.dumps(state))
    plain.info.write_to_directory(str(folder))
    return folder


def test_images_that_a_table_names_lie_in_the_dataset(tmp_path: Path) -> None:
    inside = tmp_path / "x" / "images"
    inside.mkdir(parents=True)
    paths = [inside / f"{number}.png" for number in range(4)]
    for number, path in enumerate(paths):
        Image.new("RGB", (9, 9), (number % 2, number, 0)).save(path)
    folder = with_paths(tmp_path / "x", [str(path) for path in paths])
    dataset = sources.load(spec(folder, source="jpeg", held_out=0.01))
    assert seen(dataset.train) | seen(dataset.held_out) == {(n % 2, n % 2, n) for n in range(4)}

    Image.new("RGB", (9, 9), (9, 9, 9)).save(tmp_path / "outside.png")
    (inside / "link.png").symlink_to(tmp_path / "outside.png")
    folder = with_paths(tmp_path / "x", [str(tmp_path / "outside.png"), *map(str, paths), str(inside / "link.png")])
    with pytest.raises(RequestError, match=r"2 images are broken: .*outside\.png', which lies outside of the dataset"):
        sources.check(spec(folder))


def test_a_pipe_in_a_dataset_is_refused_before_anything_waits_for_it(both: Path, tmp_path: Path) -> None:
    shutil.copytree(both, tmp_path / "x")
    shard = next((tmp_path / "x" / "train").glob("*.arrow"))
    shard.unlink()
    os.mkfifo(shard)
    with pytest.raises(RequestError, match=r"holds '.*\.arrow', a pipe or a device"):
        sources.check(spec(tmp_path / "x"))


@pytest.mark.parametrize(
    ("head", "is_refused"),
    [
        ("a: &a [x]\nb: [*a, *a]", True),
        ("license: mit\ntags: ['*not', an, alias]", False),
        ("license: mit", False),
    ],
)
def test_a_head_that_unfolds_itself_is_refused(tmp_path: Path, head: str, is_refused: bool) -> None:
    table(TRAIN).to_parquet(str(tmp_path / "x" / "train.parquet"))
    (tmp_path / "x" / "README.md").write_text(f"---\n{head}\n---\n# Pictures, with *stars* in the text\n")
    if is_refused:
        with pytest.raises(RequestError, match="repeats itself by YAML aliases"):
            sources.check(spec(tmp_path / "x"))
    else:
        assert sources.check(spec(tmp_path / "x")).classes == ("zebra", "ant", "cow")


@pytest.mark.parametrize(
    "card",
    [
        "\n \n---\na: &a [x]\nb: [*a, *a]\n---\n",
        "---\nlicense: mit\n---x: &a [x]\nb: [*a, *a]\n---\n",
        "---\r\na: &a [x]\r\nb: [*a, *a]\r\n---",
        "\n---\na: &a [x]\n" + "b: [*a, *a]\n" * 100_000,
    ],
    ids=["blanks before it", "a key like its end", "ends with the file", "longer than is looked through"],
)
def test_a_head_is_looked_for_as_the_library_delimits_it(tmp_path: Path, card: str) -> None:
    table(TRAIN).to_parquet(str(tmp_path / "x" / "train.parquet"))
    (tmp_path / "x" / "README.md").write_text(card, newline="")
    with pytest.raises(RequestError, match=r"has a README\.md whose head repeats itself by YAML aliases"):
        sources.check(spec(tmp_path / "x"))


def test_settings_that_unfold_themselves_are_refused(tmp_path: Path) -> None:
    table(TRAIN).to_parquet(str(tmp_path / "x" / "train.parquet"))
    settings = tmp_path / "x" / ".huggingface.yaml"
    settings.write_text("license: mit\n")
    assert sources.check(spec(tmp_path / "x")).classes == ("zebra", "ant", "cow")
    settings.write_text("a: &a [x]\nb: [*a, *a]\n")
    with pytest.raises(RequestError, match=r"has a \.huggingface\.yaml that repeats itself by YAML aliases"):
        sources.check(spec(tmp_path / "x"))


def test_hf_is_the_name_and_needs_one() -> None:
    assert DataSpec.model_validate({"hf": "some/images"}).name == "hf"
    with pytest.raises(RequestError, match=r"the dataset 'hf' needs data\.hf"):
        sources.check(DataSpec(name="hf"))
    with pytest.raises(RequestError, match=r"data\.hf does not apply to the dataset 'folder'"):
        sources.check(DataSpec(name="folder", root="/", hf="some/images"))


def test_without_the_library_the_message_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['datasets'] = None\n"
        "from vitscale import sources; from vitscale.trial.trial import DataSpec\n"
        "try: sources.check(DataSpec(hf='x'))\nexcept Exception as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == (f"data.hf is read by datasets, which is not installed. Run {install_command('hf')}.")
