"""The files by which a kernel tells of GPUs, in a folder: no test needs one."""

from __future__ import annotations

from pathlib import Path

_INFORMATION = """\
Model: \t\t {model}
IRQ:   \t\t 11
GPU UUID: \t GPU-00000000-0000-0000-0000-000000000000
Device Minor: \t {minor}
"""


class Kernel:
    def __init__(self, root: Path) -> None:
        self.root = root
        self._nvidia = 0
        self._rendering = 128

    def file(self, path: str, text: str = "") -> Path:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    def nvidia(self, model: str) -> None:
        minor, self._nvidia = self._nvidia, self._nvidia + 1
        self.file(f"dev/nvidia{minor}")
        information = _INFORMATION.format(model=model, minor=minor)
        self.file(f"proc/driver/nvidia/gpus/0000:0{minor}:00.0/information", information)

    def rendering(self, vendor: str, device: str, slot: str) -> None:
        """`slot`: where it sits on PCI."""
        name, self._rendering = f"renderD{self._rendering}", self._rendering + 1
        self.file(f"dev/dri/{name}")
        self.file(f"sys/devices/pci/{slot}/vendor", f"0x{vendor}\n")
        self.file(f"sys/devices/pci/{slot}/device", f"0x{device}\n")
        link = self.root / "sys/class/drm" / name / "device"
        link.parent.mkdir(parents=True)
        link.symlink_to(self.root / "sys/devices/pci" / slot)
