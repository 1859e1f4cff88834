"""Image files that tests write, valid and broken."""

import io
import struct
import zlib

import numpy as np
from PIL import Image


def encoded(image: Image.Image, format: str = "PNG", **options) -> bytes:
    out = io.BytesIO()
    image.save(out, format, **options)
    return out.getvalue()


def noise(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    bands = len(Image.new(mode, (1, 1)).getbands())
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, bands), np.uint8)
    return Image.frombytes(mode, (width, height), pixels.tobytes())


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(width: int, height: int, body: bytes = b"", depth: int = 8, color: int = 2, extra: bytes = b"") -> bytes:
    """A PNG whose header may promise anything; `body` is the compressed data."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + extra + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def animation(format: str, frames: int = 3) -> bytes:
    first, *rest = (noise(8, 8, seed=i) for i in range(frames))
    return encoded(first, format, save_all=True, append_images=rest)


def _malformed() -> dict[str, bytes]:
    good = {f: encoded(noise(64, 48), f) for f in ("PNG", "JPEG", "WEBP", "GIF", "BMP")}
    flipped = bytearray(good["PNG"])
    flipped[len(flipped) // 2] ^= 0xFF
    return {
        "nothing": b"",
        "one byte": b"\x89",
        "text": b"hello, I am a picture",
        "html": b"<html><body>404</body></html>",
        "svg": b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>',
        "pdf": b"%PDF-1.7\n1 0 obj\n",
        "zeros": bytes(1000),
        "tiff": encoded(noise(8, 8), "TIFF"),
        "icon": encoded(noise(16, 16), "ICO"),
        "netpbm": encoded(noise(8, 8), "PPM"),
        "postscript": encoded(noise(8, 8), "EPS"),
        "png signature only": good["PNG"][:8],
        "png header only": good["PNG"][:33],
        "png cut in the middle": good["PNG"][: len(good["PNG"]) // 2],
        "png with a flipped byte": bytes(flipped),
        "png of no width": png(0, 10),
        "png of no height": png(10, 0),
        "png without data": png(10, 10),
        "png with data that does not unpack": png(10, 10, b"not zlib"),
        "png with too little data": png(100, 100, zlib.compress(bytes(10))),
        "png of an unknown bit depth": png(10, 10, zlib.compress(bytes(400)), depth=7),
        "png of an unknown colour type": png(10, 10, zlib.compress(bytes(400)), color=5),
        "png text that unpacks to 100 MB": png(8, 8, extra=chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(10**8)))),
        "jpeg start only": good["JPEG"][:2],
        "jpeg header only": good["JPEG"][:20],
        "jpeg cut in the middle": good["JPEG"][: len(good["JPEG"]) // 2],
        "jpeg with a lying segment": b"\xff\xd8\xff\xe0\xff\xff" + bytes(20),
        "gif header only": good["GIF"][:10],
        "gif cut in the middle": good["GIF"][: len(good["GIF"]) // 2],
        "webp header only": good["WEBP"][:12],
        "webp cut in the middle": good["WEBP"][: len(good["WEBP"]) // 2],
        "bmp header only": good["BMP"][:20],
        "bmp cut in the middle": good["BMP"][: len(good["BMP"]) // 2],
    }


MALFORMED = _malformed()
