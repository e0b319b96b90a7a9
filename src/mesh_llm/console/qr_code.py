"""QR codes as pictures that the page can show."""

from __future__ import annotations

import segno

from mesh_llm.errors import UsageError

_SCALE = 8
"""Pixels of a module where the picture is shown as large as it is."""


def picture(text: str) -> str:
    """A `data:` address; dark on light in any colour scheme, as scanners want it."""
    try:
        code = segno.make_qr(text, error="l", boost_error=False)
    except segno.DataOverflowError:
        raise UsageError("a QR code takes at most 2,953 characters") from None
    return str(code.svg_data_uri(scale=_SCALE, light="#fff"))
