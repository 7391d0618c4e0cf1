"""One image: the right pixels come out, a broken one is named, a hostile one costs nothing."""

from __future__ import annotations

import contextlib
import io
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from image_files import photograph
from vitscale.errors import RequestError
from vitscale.sources import pictures
from vitscale.sources.arrays import ArrayShape
from vitscale.sources.cache import map_in_threads
from vitscale.sources.decoding import decode_image
from vitscale.sources.image_folder import Files
from vitscale.sources.pictures import EXTENSIONS, decode_square, verify_picture


def noise(height: int, width: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3)).astype(np.uint8))


def saved(path: Path, image: Image.Image) -> str:
    image.save(path)
    return str(path)


@pytest.mark.parametrize(("height", "width"), [(16, 16), (16, 30), (40, 16)])
def test_an_image_of_the_right_short_side_is_cropped_exactly(tmp_path: Path, height: int, width: int) -> None:
    image = noise(height, width)
    top, left = (height - 16) // 2, (width - 16) // 2
    expected = np.asarray(image)[top : top + 16, left : left + 16]
    np.testing.assert_array_equal(decode_square(saved(tmp_path / "x.png", image), 16), expected)


JPEGS: dict[str, dict[str, Any]] = {
    "4:2:0": {"subsampling": 2},
    "4:4:4": {"subsampling": 0},
    "progressive": {"progressive": True},
    "coarse": {"quality": 5},
}


@pytest.mark.parametrize("kind", [*JPEGS, "grey", "CMYK"])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("side", [16, 31, 64, 150])
def test_the_fast_decoder_gives_pillow_s_pixels(tmp_path: Path, kind: str, channels: int, side: int) -> None:
    """To the bit, at every scale that the decoder itself takes: which of the two is installed changes no result."""
    pytest.importorskip("simplejpeg")
    image = photograph(201, 131)
    if kind in ("grey", "CMYK"):
        image = image.convert("L" if kind == "grey" else kind)
    path = tmp_path / "x.jpg"
    image.save(path, **JPEGS.get(kind, {}))
    fast, by_bytes = decode_square(str(path), side, channels), decode_square(path.read_bytes(), side, channels)
    with pytest.MonkeyPatch.context() as patch:
        size = pictures.Size(side, side)
        assert (pictures._decode_jpeg(path.read_bytes(), lambda _: size, channels) is None) == (kind == "CMYK")
        patch.setattr(pictures, "_simplejpeg", lambda: None)
        slow = decode_square(str(path), side, channels)
    np.testing.assert_array_equal(fast, slow)
    np.testing.assert_array_equal(by_bytes, slow)
    assert slow.shape == (side, side, channels)


def test_scaling_down_averages(tmp_path: Path) -> None:
    """A board of black and white pixels becomes grey: without antialiasing it would be black or white."""
    board = ((np.indices((64, 64)).sum(axis=0) % 2) * 255).astype(np.uint8)
    small = decode_square(saved(tmp_path / "x.png", Image.fromarray(board)), 8)
    assert abs(small.astype(int) - 127.5).max() < 4


@pytest.mark.parametrize("extension", sorted(EXTENSIONS))
def test_every_format_is_read(tmp_path: Path, extension: str) -> None:
    path = saved(tmp_path / f"x{extension}", Image.new("L" if extension == ".pgm" else "RGB", (20, 30), 200))
    verify_picture(path)
    pixels = decode_square(path, 8)
    assert pixels.shape == (8, 8, 3)
    assert pixels.dtype == np.uint8
    colour = (200, 200, 200) if extension == ".pgm" else (200, 0, 0)
    assert abs(pixels.astype(int) - colour).max() <= 2


@pytest.mark.parametrize(
    ("image", "colour"),
    [
        (Image.new("L", (9, 9), 77), (77, 77, 77)),
        (Image.new("1", (9, 9), 1), (255, 255, 255)),
        (Image.new("RGBA", (9, 9), (10, 20, 30, 255)), (10, 20, 30)),
        (Image.new("RGB", (9, 9), (10, 20, 30)).quantize(), (10, 20, 30)),
        (Image.fromarray(np.full((9, 9), 0x8000, np.uint16)), (128, 128, 128)),
    ],
    ids=["grey", "bits", "alpha", "palette", "16 bits"],
)
def test_every_mode_becomes_rgb(tmp_path: Path, image: Image.Image, colour: tuple[int, int, int]) -> None:
    assert (decode_square(saved(tmp_path / "x.png", image), 4) == colour).all()


def test_a_grey_map_of_16_bits_keeps_its_upper_eight(tmp_path: Path) -> None:
    path = tmp_path / "x.pgm"
    path.write_bytes(b"P5 9 9 65535\n" + bytes([0x40, 0x10]) * 81)
    assert (decode_square(str(path), 4) == 0x40).all()
    assert (decode_square(str(path), 4, channels=1) == 0x40).all()


@pytest.mark.parametrize("dtype", ["uint16", "float32"])
def test_a_set_of_16_bits_keeps_those_of_grey_pictures_and_refuses_those_of_colours(tmp_path: Path, dtype: Any) -> None:
    """A png and a map of 1,000 (3 in its upper 8 bits), and a picture of 8 bits."""
    Image.fromarray(np.full((9, 9), 1000, np.uint16)).save(tmp_path / "0.png")
    (tmp_path / "1.pgm").write_bytes(b"P5 9 9 65535\n" + bytes([0x03, 0xE8]) * 81)
    Image.new("RGB", (9, 9), (7, 7, 7)).save(tmp_path / "2.jpg")
    files = Files(tuple(str(tmp_path / name) for name in ("0.png", "1.pgm", "2.jpg")), np.zeros(3, np.int64))
    grey = [decode_image(files, number, ArrayShape(4, 1, dtype)) for number in range(3)]
    assert [(image.dtype, *np.unique(image)) for image in grey] == [(np.dtype(dtype), n) for n in (1000, 1000, 7)]
    assert (decode_image(files, 2, ArrayShape(4, 3, dtype)) == 7).all()
    told = r"has 16 bits, of which 8 would be lost in 3 channels\. Store such images as TIFF or \.npy"
    with pytest.raises(RequestError, match=told):
        decode_image(files, 0, ArrayShape(4, 3, dtype))


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_numbers_of_32_bits_are_no_colours(tmp_path: Path, dtype: Any) -> None:
    """Pillow would clip them, so that all below 1 becomes black."""
    path = saved(tmp_path / "x.tif", Image.fromarray(np.full((9, 9), 0.7, np.float32).astype(dtype)))
    with pytest.raises(RequestError, match=r"'.*x\.tif' is broken: it holds .* of 32 bits, no colours"):
        decode_square(path, 4)


@pytest.mark.parametrize("extension", [".jpg", ".png"])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.95])
def test_a_truncated_image_is_found_before_it_is_decoded(tmp_path: Path, extension: str, share: float) -> None:
    path = Path(saved(tmp_path / f"x{extension}", noise(200, 200)))
    content = path.read_bytes()
    verify_picture(str(path))
    path.write_bytes(content[: int(len(content) * share)])
    for action in (lambda: verify_picture(str(path)), lambda: decode_square(str(path), 8)):
        with pytest.raises(RequestError, match=rf"{path}' is broken"):
            action()


@pytest.mark.parametrize("extension", [".jpg", ".png"])
def test_other_data_after_the_end_is_no_damage(tmp_path: Path, extension: str) -> None:
    path = Path(saved(tmp_path / f"x{extension}", noise(50, 50)))
    path.write_bytes(path.read_bytes() + b"\0" * 20_000)
    verify_picture(str(path))


def png_claiming(width: int, height: int) -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(b"\0" * 1000)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


@pytest.mark.parametrize("side", [10_001, 100_000, 2**31 - 1])
def test_a_decompression_bomb_is_refused_in_one_message(tmp_path: Path, side: int) -> None:
    path = tmp_path / "bomb.png"
    path.write_bytes(png_claiming(side, side))
    program = f"""if True:
        from vitscale.errors import RequestError
        from vitscale.sources.pictures import decode_square, verify_picture
        for action in (lambda: verify_picture({str(path)!r}), lambda: decode_square({str(path)!r}, 8)):
            try:
                action()
            except RequestError as error:
                print(error)
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == ""  # no warning of Pillow's beside our message
    assert done.stdout.count("bomb.png' is broken") == 2


def test_a_very_long_image_is_not_scaled_as_a_whole(tmp_path: Path) -> None:
    assert decode_square(saved(tmp_path / "x.png", Image.new("L", (90_000, 1))), 64).shape == (64, 64, 3)


def test_formats_that_start_programs_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "x.jpg"
    Image.new("RGB", (8, 8)).save(path, format="EPS")
    with pytest.raises(RequestError, match="not an image that can be read"):
        verify_picture(str(path))


def test_what_is_missing_or_a_folder_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent.png"):
        with pytest.raises(RequestError, match="is broken"):
            verify_picture(str(path))


@pytest.mark.filterwarnings("ignore::UserWarning")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_a_damaged_image_raises_nothing_but_a_request_error(tmp_path: Path, data: st.DataObject) -> None:
    extension = data.draw(st.sampled_from([".jpg", ".png", ".bmp", ".gif", ".webp", ".tif", ".ppm"]))
    buffer = io.BytesIO()
    noise(9, 12).save(buffer, format=EXTENSIONS[extension])
    content = bytearray(buffer.getvalue())
    for position in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=4)):
        content[position] = data.draw(st.integers(0, 255))
    path = tmp_path / f"x{extension}"
    path.write_bytes(content)
    with contextlib.suppress(RequestError):
        verify_picture(str(path))
        assert decode_square(str(path), 4).shape == (4, 4, 3)


def test_threads_keep_the_order_and_stop_at_the_first_failure() -> None:
    assert list(map_in_threads(lambda number: number * 2, range(10_000))) == list(range(0, 20_000, 2))
    seen: list[int] = []

    def fail_at_5(number: int) -> None:
        seen.append(number)
        if number == 5:
            raise ValueError("five")

    with pytest.raises(ValueError, match="five"):
        list(map_in_threads(fail_at_5, range(1_000_000)))
    assert len(seen) <= 4096
