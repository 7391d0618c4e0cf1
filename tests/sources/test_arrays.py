"""Images of many channels and bits: the numbers that were written come out; what is damaged or too large is named."""

from __future__ import annotations

import lzma
import os
import struct
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from image_files import cache
from vitscale import sources
from vitscale.base.distribution import install_command
from vitscale.errors import RequestError
from vitscale.sources.arrays import ArrayShape, decode_array, images_in, verify_array
from vitscale.trial.trial import DataSpec, PixelType

h5py = pytest.importorskip("h5py", reason="pip install 'vitscale[images]'")
tifffile = pytest.importorskip("tifffile", reason="pip install 'vitscale[images]'")

__all__ = ["cache"]

RNG = np.random.default_rng(0)


def values(shape: tuple[int, ...], dtype: str) -> Any:
    return (RNG.random(shape) * 50_000).astype(dtype) if dtype != "uint8" else RNG.integers(0, 255, shape, np.uint8)


def write_npy(path: Path, array: Any) -> None:
    np.save(path, array)


def write_npz(path: Path, array: Any) -> None:
    np.savez_compressed(path, image=array, mask=array[:1])


def write_tiff(path: Path, array: Any) -> None:
    """A page a channel."""
    pages = np.moveaxis(array, -1, 0) if array.ndim == 3 else array
    tifffile.imwrite(path, pages, compression="zlib", photometric="minisblack")


WRITERS: dict[str, Callable[[Path, Any], None]] = {".npy": write_npy, ".npz": write_npz, ".tif": write_tiff}


def decoded(path: Path, shape: ArrayShape, part: int = 0) -> Any:
    """As files and as what is in them."""
    verify_array(str(path), shape, str(path))
    whole = decode_array(str(path), shape, part, str(path))
    np.testing.assert_array_equal(decode_array(path.read_bytes(), shape, part, path.name), whole)
    assert (whole.shape, whole.dtype) == ((shape.side, shape.side, shape.channels), np.dtype(shape.dtype))
    return whole


@pytest.mark.parametrize("suffix", WRITERS)
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32"])
@pytest.mark.parametrize("channels", [1, 5, 200])
def test_what_was_written_comes_out(tmp_path: Path, suffix: str, dtype: PixelType, channels: int) -> None:
    array = values((6, 6, channels), dtype)
    path = tmp_path / f"an image ü{suffix}"
    WRITERS[suffix](path, array)
    np.testing.assert_array_equal(decoded(path, ArrayShape(6, channels, dtype)), array)


@pytest.mark.parametrize("suffix", WRITERS)
def test_the_centre_square_of_a_plane_without_an_axis_of_channels(tmp_path: Path, suffix: str) -> None:
    array = values((6, 10), "uint16")
    path = tmp_path / f"x{suffix}"
    WRITERS[suffix](path, array)
    np.testing.assert_array_equal(decoded(path, ArrayShape(6, 1, "uint16"))[..., 0], array[:, 2:8])


def test_scaling_averages_each_channel(tmp_path: Path) -> None:
    board = (np.indices((64, 64)).sum(axis=0) % 2) * np.array([60_000, 10])[:, None, None]
    np.save(tmp_path / "x.npy", board.astype(np.uint16))  # channels first
    small = decoded(tmp_path / "x.npy", ArrayShape(8, 2, "uint16"))
    assert abs(small[..., 0].astype(int) - 30_000).max() < 1000
    assert abs(small[..., 1].astype(int) - 5).max() <= 1


@pytest.mark.parametrize(
    ("written", "asked", "fits"),
    [
        ("uint8", "uint16", True),
        ("uint16", "float32", True),
        ("float64", "float32", True),
        ("int16", "float32", True),
        ("uint16", "uint8", False),
        ("float32", "uint16", False),
        ("int16", "uint16", False),
        ("complex64", "uint8", False),
    ],
)
def test_bits_are_widened_and_never_cut(tmp_path: Path, written: str, asked: PixelType, fits: bool) -> None:
    array = np.arange(9).reshape(3, 3).astype(written)
    np.save(tmp_path / "x.npy", array)
    if fits:
        np.testing.assert_array_equal(decoded(tmp_path / "x.npy", ArrayShape(3, 1, asked))[..., 0], array)
    else:
        with pytest.raises(
            RequestError, match=rf"x\.npy' is broken: it holds {written}, which data\.dtype = '{asked}'"
        ):
            verify_array(str(tmp_path / "x.npy"), ArrayShape(3, 1, asked), str(tmp_path / "x.npy"))


# --- HDF5 as fastMRI has it ------------------------------------------------------------------------------------------


def write_volume(path: Path, scan: str | None = None, **arrays_: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        for key, array in arrays_.items():
            file.create_dataset(key, data=array, compression="gzip" if array.size > 100 else None)
        if scan is not None:
            file.attrs["acquisition"] = scan


def test_a_slice_of_a_reconstruction_is_an_image(tmp_path: Path) -> None:
    volume = values((7, 6, 6), "float32")
    write_volume(tmp_path / "v.h5", kspace=np.zeros((7, 3, 6, 6), np.complex64), reconstruction_rss=volume)
    assert images_in(str(tmp_path / "v.h5"), "v.h5") == 7
    for part in (0, 6):
        np.testing.assert_array_equal(
            decoded(tmp_path / "v.h5", ArrayShape(6, 1, "float32"), part)[..., 0], volume[part]
        )


def test_k_space_alone_becomes_the_magnitude_of_each_coil(tmp_path: Path) -> None:
    """The centred transform of an image, put in, gives the image back."""
    image = RNG.random((2, 4, 8, 8)) + 1j * RNG.random((2, 4, 8, 8))
    axes = (-2, -1)
    kspace = np.fft.fftshift(np.fft.fft2(np.fft.ifftshift(image, axes), norm="ortho"), axes)
    write_volume(tmp_path / "v.h5", kspace=kspace.astype(np.complex64))
    got = decoded(tmp_path / "v.h5", ArrayShape(8, 4, "float32"), 1)
    np.testing.assert_allclose(got, np.moveaxis(np.abs(image[1]), 0, -1), rtol=1e-4)


def test_volumes_side_by_side_are_classed_by_their_acquisition(tmp_path: Path) -> None:
    for split, volumes in (("train", 4), ("val", 2)):
        for n in range(volumes):
            scan = ("CORPD_FBK", "CORPDFS_FBK")[n % 2]
            slices = np.full((3, 4, 4), n % 2, np.float32)
            write_volume(tmp_path / split / f"file{n}.h5", scan, reconstruction_rss=slices)
    spec = DataSpec(name="folder", root=str(tmp_path), source_size=4, channels=1, dtype="float32")
    assert sources.check(spec).classes == ("CORPDFS_FBK", "CORPD_FBK")
    dataset = sources.load(spec)
    assert (dataset.summary.train_samples, dataset.summary.held_out_samples) == (12, 6)
    images = dataset.train.take(np.arange(12))
    assert (images == (1 - dataset.train.labels)[:, None, None, None]).all()
    write_volume(tmp_path / "train" / "unknown.h5", None, reconstruction_rss=np.ones((1, 4, 4), np.float32))
    with pytest.raises(RequestError, match=r"unknown\.h5' lies in no class folder, and no attribute 'acquisition'"):
        sources.check(spec)


# --- a whole set -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "source"), [("uint16", "jpeg"), ("uint16", "cache"), ("float32", "memory")])
def test_statistics_are_those_of_the_training_images(tmp_path: Path, dtype: PixelType, source: Any) -> None:
    for n in range(10):
        (tmp_path / "ab"[n % 2]).mkdir(exist_ok=True)
        np.save(tmp_path / "ab"[n % 2] / f"{n}.npy", values((5, 5, 4), dtype) * np.array([1, 0, 1, 1], dtype))
    dataset = sources.load(
        DataSpec(name="folder", root=str(tmp_path), source_size=5, channels=4, dtype=dtype, source=source)
    )
    train = dataset.train.take(np.arange(len(dataset.train))).astype(np.float64)
    assert dataset.summary.image_shape == (5, 5, 4)
    assert dataset.statistics is not None
    assert dataset.statistics.mean == pytest.approx(train.mean(axis=(0, 1, 2)))
    expected = train.std(axis=(0, 1, 2))
    expected[1] = 1.0  # a channel that is 0 everywhere is divided by nothing
    assert dataset.statistics.std == pytest.approx(expected)


def test_pictures_in_colour_have_published_statistics() -> None:
    assert sources.load(DataSpec(name="synthetic", samples=4)).statistics is None
    grey = sources.load(DataSpec(name="synthetic", samples=40, channels=1)).statistics
    assert grey is not None
    assert 100 < grey.mean[0] < 155


# --- damage and bombs ------------------------------------------------------------------------------------------------


SHAPE = ArrayShape(8, 4, "uint16")


def whole(path: Path) -> None:
    array = values((8, 8, 4), "uint16")
    if path.suffix == ".h5":
        write_volume(path, kspace=np.zeros((2, 4, 8, 8), np.float32))
    else:
        WRITERS[path.suffix](path, array)


@pytest.mark.parametrize("suffix", [*WRITERS, ".h5"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_a_truncated_file_is_found_before_it_is_decoded(tmp_path: Path, suffix: str, share: float) -> None:
    path = tmp_path / f"x y{suffix}"
    whole(path)
    shape = SHAPE._replace(dtype="float32") if suffix == ".h5" else SHAPE
    verify_array(str(path), shape, str(path))
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    for action in (verify_array, lambda at, shape, name: decode_array(at, shape, 0, name)):
        with pytest.raises(RequestError, match=rf"the image '{path}' is broken: "):
            action(str(path), shape, str(path))


def npy_claiming(shape: str, descr: str = "<u2") -> bytes:
    header = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}"
    header = header.ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode()


def write_bomb(path: Path, kind: str) -> None:
    match kind:
        case "pixels":
            path.write_bytes(npy_claiming("(20000, 20000, 4)"))
        case "bytes":
            path.write_bytes(npy_claiming("(9000, 9000, 40)"))
        case "objects":
            path.write_bytes(npy_claiming("(8, 8, 4)", "|O"))
        case "member":
            with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
                archive.writestr("image.npy", npy_claiming("(9000, 9000, 40)") + b"\0" * 1000)
        case "pages":
            tifffile.imwrite(path, np.zeros((4, 8, 8), np.uint16), compression="zlib", photometric="minisblack")
            with tifffile.TiffFile(path, mode="r+b") as tiff:
                for page in tiff.pages:
                    page.tags["ImageWidth"].overwrite(60_000)
                    page.tags["ImageLength"].overwrite(60_000)
        case "deflated":
            bomb = zlib.compress(b"\0" * 30_000_000)
            page = {"shape": (8, 8), "dtype": "uint16", "compression": "zlib", "photometric": "minisblack"}
            tifffile.imwrite(path, iter([bomb] * 4), **(page | {"shape": (4, 8, 8)}))
        case "lzma":
            bomb = lzma.compress(b"\0" * 300_000_000, preset=0)
            page = {"shape": (4, 8, 8), "dtype": "uint16", "compression": "lzma", "photometric": "minisblack"}
            tifffile.imwrite(path, iter([bomb] * 4), **page)
        case "twice":  # 3 kB become 3 MB, and these 3 GB
            with h5py.File(path, "w") as file:
                packing = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
                packing.set_chunk((1, 4, 8, 8))
                for _ in range(2):
                    packing.set_filter(h5py.h5z.FILTER_DEFLATE, h5py.h5z.FLAG_MANDATORY, (9,))
                space, kind = h5py.h5s.create_simple((1, 4, 8, 8)), h5py.h5t.NATIVE_UINT16
                volume = h5py.h5d.create(file.id, b"kspace", kind, space, packing)
                volume.write_direct_chunk((0, 0, 0, 0), zlib.compress(zlib.compress(b"\0" * 300_000_000, 9), 9))
        case "chunk":  # 290 kB that become 300 MB, where there is room for 256 kB
            with h5py.File(path, "w") as file:
                shape = (1, 4, 181, 181)
                volume = file.create_dataset("kspace", shape, np.uint16, chunks=shape, compression="gzip")
                volume.id.write_direct_chunk((0, 0, 0, 0), zlib.compress(b"\0" * 300_000_000, 9))
        case "volume":
            with h5py.File(path, "w") as file:
                file.create_dataset("kspace", (2, 4, 40_000, 40_000), np.float32, chunks=(1, 1, 100, 100))


@pytest.mark.parametrize(
    ("name", "kind", "says"),
    [
        ("x.npy", "pixels", "claims 400,000,000 pixels, more than 100,000,000"),
        ("x.npy", "bytes", "claims 6,480,000,000 bytes, more than 2,147,483,648"),
        ("x.npy", "objects", "holds Python objects"),
        ("x.npz", "member", "claims 6,480,000,000 bytes"),
        ("x.tif", "pages", "claims|truncated"),
        ("x.tif", "deflated", "unpacks to more than the 128 bytes of its size"),
        ("x.tif", "lzma", "unpacks to more than the 128 bytes of its size"),
        ("x.h5", "volume", "claims 1,600,000,000 pixels"),
        ("x.h5", "twice", "is packed by gzip, gzip; read is gzip, shuffle, fletcher32, lzf, each once"),
        ("x.h5", "chunk", "unpacks to more than the 262,092 bytes of its size"),
    ],
)
def test_a_bomb_is_refused_in_one_message_and_little_memory(tmp_path: Path, name: str, kind: str, says: str) -> None:
    path = tmp_path / name
    write_bomb(path, kind)
    program = f"""if True:
        import re, resource
        from vitscale.errors import RequestError
        from vitscale.sources.arrays import ArrayShape, verify_array
        import h5py, tifffile
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            verify_array({str(path)!r}, ArrayShape(8, 4, "uint16"), {str(path)!r})
        except RequestError as error:
            print(bool(re.search({says!r}, str(error))), str(error))
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 60_000
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert done.stdout.startswith("True the image '"), done.stdout


def test_a_volume_that_is_broken_is_named_once_for_all_its_slices(tmp_path: Path) -> None:
    for kind in ("a", "b"):
        (tmp_path / kind).mkdir()
        write_volume(tmp_path / kind / "whole.h5", reconstruction_rss=np.ones((3, 8, 8), np.float32))
    write_bomb(tmp_path / "a" / "bomb.h5", "volume")  # two slices
    with pytest.raises(RequestError) as caught:
        sources.check(DataSpec(name="folder", root=str(tmp_path), channels=4, dtype="float32", source_size=8))
    assert str(caught.value).count("bomb.h5'") == 1
    assert "more than 100,000,000; 2 of its images)" in str(caught.value)


def linked(path: Path, kind: str) -> None:
    other = path.with_name("other.h5")
    write_volume(other, reconstruction_rss=np.ones((2, 8, 8), np.float32))
    with h5py.File(path, "w") as file:
        match kind:
            case "link":
                file["reconstruction_rss"] = h5py.ExternalLink(str(other), "reconstruction_rss")
            case "raw":
                file.create_dataset("reconstruction_rss", (2, 8, 8), "f4", external=[(str(other), 0, 512)])
            case "virtual":
                layout = h5py.VirtualLayout((2, 8, 8), "f4")
                layout[:] = h5py.VirtualSource(str(other), "reconstruction_rss", (2, 8, 8))
                file.create_virtual_dataset("reconstruction_rss", layout)


@pytest.mark.parametrize("kind", ["link", "raw", "virtual"])
def test_hdf5_that_points_to_other_files_is_refused(tmp_path: Path, kind: str) -> None:
    linked(tmp_path / "x.h5", kind)
    with pytest.raises(RequestError, match=r"its reconstruction_rss (is a link out of|lies in other files)"):
        images_in(str(tmp_path / "x.h5"), "x.h5")


def ome_description(file_name: str) -> str:
    """OME-XML that says: both channels are the first page of another file."""
    planes = "".join(
        f'<TiffData IFD="0" FirstC="{channel}" FirstZ="0" FirstT="0" PlaneCount="1">'
        f'<UUID FileName="{file_name}">urn:uuid:x</UUID></TiffData>'
        for channel in range(2)
    )
    return (
        '<?xml version="1.0"?><OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06" UUID="urn:uuid:a">'
        '<Image ID="Image:0"><Pixels ID="Pixels:0" DimensionOrder="XYZCT" Type="uint16" SizeX="8" SizeY="8" SizeZ="1" '
        f'SizeC="2" SizeT="1"><Channel ID="Channel:0:0" SamplesPerPixel="1"/>{planes}</Pixels></Image></OME>'
    )


def write_ndtiff(path: Path, pixels: Any, file_name: str) -> None:
    """A page as Micro-Manager writes it, beside an index that says: the page's pixels stand in another file."""
    summary = b"{}".ljust(8)
    header = struct.pack("<4I", 483729, 2, 2355492, len(summary)) + summary
    begins = 8 + len(header)
    text, short, long = 2, 3, 4
    fields = [
        (256, short, pixels.shape[1]), (257, short, pixels.shape[0]), (258, short, 16), (259, short, 1),
        (262, short, 1), (273, long, begins), (277, short, 1), (278, short, pixels.shape[0]),
        (279, long, pixels.nbytes), (51123, text, 24),
    ]  # fmt: skip
    page = struct.pack("<H", len(fields))
    for tag, kind, value in fields:
        count = len(summary) if kind == text else 1
        page += struct.pack("<HHII", tag, kind, count, value)
    tiff = b"II*\0" + struct.pack("<I", begins + pixels.nbytes) + header + pixels.tobytes() + page + bytes(4)
    path.write_bytes(tiff)

    axes = b'{"channel": 0}'
    name = file_name.encode()
    numbers = struct.pack("<IiiiiIii", begins, pixels.shape[1], pixels.shape[0], 1, 0, 0, 0, 0)
    index = struct.pack("<I", len(axes)) + axes + struct.pack("<I", len(name)) + name + numbers
    path.with_name("NDTiff.index").write_bytes(index)


@pytest.mark.parametrize("form", ["ome", "ndtiff"])
def test_a_tiff_that_names_other_files_is_read_without_them(tmp_path: Path, form: str) -> None:
    """Its own page has one channel; 777 stands in a file outside, which may as well be a pipe that nobody writes to."""
    (tmp_path / "class").mkdir()
    path = tmp_path / "class" / "x.tif"
    own = np.full((8, 8), 5, np.uint16)
    outside = tmp_path / "outside.tif"
    tifffile.imwrite(outside, np.full((8, 8), 777, np.uint16), photometric="minisblack")
    if form == "ome":
        description = ome_description("../outside.tif")
        tifffile.imwrite(path, own, description=description, metadata=None, photometric="minisblack")
    else:
        write_ndtiff(path, own, "../outside.tif")
    np.testing.assert_array_equal(decoded(path, ArrayShape(8, 1, "uint16"))[..., 0], own)
    with pytest.raises(RequestError, match="it holds 8 x 8, not height x width x 2"):
        verify_array(str(path), ArrayShape(8, 2, "uint16"), "x.tif")
    outside.unlink()
    os.mkfifo(outside)
    verify_array(str(path), ArrayShape(8, 1, "uint16"), "x.tif")


def write_claim(path: Path, slices: int, side: int) -> None:
    """A volume of which no slice is stored."""
    with h5py.File(path, "w") as file:
        file.create_dataset("reconstruction_rss", shape=(slices, side, side), dtype="f4", chunks=(1, side, side))


@pytest.mark.parametrize(
    ("slices", "side", "says"),
    [
        (10**9, 20, "claims 1,000,000,000 slices, more than 16,384"),
        (16_000, 20, "claims 25,600,000 bytes of slices, and a file of"),
    ],
)
def test_slices_that_a_file_only_claims_are_refused(tmp_path: Path, slices: int, side: int, says: str) -> None:
    write_claim(tmp_path / "x.h5", slices, side)
    for content in (str(tmp_path / "x.h5"), (tmp_path / "x.h5").read_bytes()):
        with pytest.raises(RequestError, match=says):
            images_in(content, "x.h5")


def test_equal_slices_that_are_stored_are_images(tmp_path: Path) -> None:
    """A thousand of them are packed as small as zlib can."""
    with h5py.File(tmp_path / "x.h5", "w") as file:
        zeros = np.zeros((1000, 64, 64), np.float32)
        file.create_dataset("reconstruction_rss", data=zeros, compression="gzip", compression_opts=9)
    assert images_in(str(tmp_path / "x.h5"), "x.h5") == 1000


@pytest.mark.parametrize(
    ("name", "write", "says"),
    [
        ("x.npy", lambda path: np.save(path, np.zeros((8, 8, 3), np.uint16)), "8 x 8 x 3, not height x width x 4"),
        ("x.npy", lambda path: np.save(path, np.zeros((8, 0, 4), np.uint16)), "it is empty"),
        ("x.npy", lambda path: np.save(path, np.uint16(3)), "holds a single value, not"),
        ("x.npz", lambda path: np.savez(path, a=np.zeros(3), b=np.zeros(3)), "2 arrays, and none is called 'image'"),
        ("x.h5", lambda path: write_volume(path, image=np.zeros(3)), "it holds 'image', and none of fastMRI's"),
        ("x.tif", lambda path: path.write_bytes(b"II*\0hello"), ""),
    ],
)
def test_what_is_no_such_image_is_said(tmp_path: Path, name: str, write: Any, says: str) -> None:
    write(tmp_path / name)
    with pytest.raises(RequestError, match=rf"'{name}' is broken: .*{says}"):
        verify_array(str(tmp_path / name), SHAPE, name)


def test_values_that_are_not_finite_are_found_when_decoded(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.array([[1, np.nan], [1, 1]], np.float32))
    with pytest.raises(RequestError, match="values that are not finite"):
        decode_array(str(tmp_path / "x.npy"), ArrayShape(2, 1, "float32"), 0, "x.npy")


def test_a_library_that_is_missing_is_named(tmp_path: Path) -> None:
    whole(tmp_path / "x.h5")
    program = (
        "import sys; sys.modules['h5py'] = None\nfrom vitscale.sources.arrays import images_in\n"
        f"try: images_in({str(tmp_path / 'x.h5')!r}, 'x.h5')\nexcept Exception as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"HDF5 is read by h5py, which is not installed. Run {install_command('images')}."
