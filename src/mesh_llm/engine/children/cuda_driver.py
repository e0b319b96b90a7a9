"""Child: which CUDA the NVIDIA driver of this machine runs, and what its GPUs are.

Reads one line, writes one: `{"release": [13, 0], "gpus": [{"name": "…", "capability": [9, 0]}]}`, or null
where the driver's library does not load.
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

_MAJOR, _MINOR = 75, 76
"""The driver's numbers for the two parts of a compute capability."""


def main() -> None:
    sys.stdin.readline()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        print("null")
        return
    release = _number(driver.cuDriverGetVersion)
    found = (
        [_gpu(driver, index) for index in range(_number(driver.cuDeviceGetCount))] if _starts(driver) else []
    )
    print(json.dumps({"release": [release // 1000, release % 1000 // 10], "gpus": found}))


def _starts(driver: ctypes.CDLL) -> bool:
    return bool(driver.cuInit(0) == 0)


def _number(function: Any, *arguments: int) -> int:
    value = ctypes.c_int(0)
    function(ctypes.byref(value), *arguments)
    return value.value


def _gpu(driver: ctypes.CDLL, index: int) -> dict[str, Any]:
    device = _number(driver.cuDeviceGet, index)
    name = ctypes.create_string_buffer(256)
    driver.cuDeviceGetName(name, len(name), device)
    capability = [_number(driver.cuDeviceGetAttribute, part, device) for part in (_MAJOR, _MINOR)]
    return {"name": name.value.decode(errors="replace"), "capability": capability}


if __name__ == "__main__":
    main()
