"""The codec zstd: raw bytes, sorted into planes and compressed; gives the same bits back."""

from __future__ import annotations

from ..errors import BlobError, Unsupported
from ..ops.kv_dtypes import KV_DTYPES
from .address import LayerForm
from .codecs import Data, Raw, check_size, planes, unplanes
from .layer import LayerKV, layer_bytes

try:
    import zstandard
except ImportError:  # the extra is not installed; reported when the codec is asked for
    zstandard = None  # type: ignore[assignment]

LEVEL = 1  # higher levels take several times as long on KV and gain about a hundredth


class Zstd:
    """The bytes of `Raw`, compressed."""

    name = "zstd"
    lossy = False

    def __init__(self) -> None:
        if zstandard is None:
            raise Unsupported("the codec zstd needs the package zstandard; install kvilt[store], or use the codec raw")
        self._raw = Raw()

    def encode(self, layer: LayerKV) -> bytes:
        width = layer.keys.dtype.itemsize
        return zstandard.ZstdCompressor(level=LEVEL).compress(planes(self._raw.encode(layer), width))

    def decode(self, data: Data, form: LayerForm, tokens: int) -> LayerKV:
        expected = layer_bytes(form, tokens)
        if expected == 0:
            check_size(data, len(self.encode(self._raw.decode(b"", form, tokens))))
            return self._raw.decode(b"", form, tokens)
        try:
            # The size is read before anything is decompressed, so that a bomb is refused.
            if zstandard.frame_content_size(data) != expected:
                raise BlobError(
                    "payload", f"a layer of {expected} bytes was promised, the frame unpacks to another size"
                )
            plain = zstandard.ZstdDecompressor().decompress(data, max_output_size=expected, allow_extra_data=False)
        except zstandard.ZstdError:
            raise BlobError("payload", "a frame cannot be unpacked") from None
        check_size(plain, expected)
        return self._raw.decode(unplanes(plain, KV_DTYPES[form.dtype].storage.itemsize), form, tokens)
