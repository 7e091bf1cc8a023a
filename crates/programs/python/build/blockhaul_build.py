"""Builds the wheel: the package, the extension module, and the program ``blockhaul`` beside it.

A build backend of its own (PEP 517), because the usual ones put either an extension module or a program
into a wheel. It needs cargo, and no package.

    pip install .                                       # calls it
    python3 crates/programs/python/build/blockhaul_build.py wheel DIR [--from target/debug]
    python3 crates/programs/python/build/blockhaul_build.py install WHEEL ENVIRONMENT

BLOCKHAUL_WHEEL_PLATFORM is the platform in the name of the wheel, for example manylinux_2_36_x86_64.
BLOCKHAUL_WHEEL_COMPILED is a directory with both files, which are then not compiled.
"""

import base64
import hashlib
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent
ROOT = PACKAGE.parents[2]
NAME = "blockhaul"
#: The oldest Python whose stable interface the module uses.
PYTHON = "cp311-abi3"
#: Profile of the wheel: as packages that are distributed.
PROFILE = "dist"


def version() -> str:
    """The version of the workspace."""
    text = (ROOT / "Cargo.toml").read_text()
    found = re.search(r'^\[workspace\.package\]\nversion = "([^"]+)"', text, re.MULTILINE)
    if found is None:
        raise RuntimeError("Cargo.toml has no version of the workspace")
    return found[1]


def metadata() -> str:
    """The metadata of the package."""
    readme = (PACKAGE / "README.md").read_text()
    return (
        f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {version()}\n"
        "Summary: Disks over NBD and in files: a client, devices, copies and a server\n"
        "License: MIT OR Apache-2.0\n"
        "Keywords: nbd,block-device,disk-image,backup,storage\n"
        "Classifier: Operating System :: POSIX :: Linux\n"
        "Classifier: Programming Language :: Python :: 3\n"
        "Classifier: Programming Language :: Rust\n"
        "Classifier: Typing :: Typed\n"
        "Requires-Python: >=3.11\nDescription-Content-Type: text/markdown\n\n" + readme
    )


def wheel_file() -> str:
    """The description of the wheel."""
    tag = f"{PYTHON}-{platform()}"
    return f"Wheel-Version: 1.0\nGenerator: {NAME}\nRoot-Is-Purelib: false\nTag: {tag}\n"


def platform() -> str:
    """The platform in the name of the wheel."""
    usual = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    return os.environ.get("BLOCKHAUL_WHEEL_PLATFORM", usual)


def compile_all() -> Path:
    """Compiles the module and the program; returns their directory."""
    compiled = os.environ.get("BLOCKHAUL_WHEEL_COMPILED")
    if compiled is not None:
        return Path(compiled)
    cargo = os.environ.get("CARGO", "cargo")
    packages = ["--package", "blockhaul-python-module", "--package", "blockhaul-cli"]
    # One at a time: together they would share features.
    for package in zip(packages[::2], packages[1::2]):
        subprocess.run([cargo, "build", "--profile", PROFILE, *package], cwd=ROOT, check=True)
    command = [cargo, "metadata", "--no-deps", "--format-version", "1"]
    told = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    found = re.search(r'"target_directory":"([^"]+)"', told)
    if found is None:
        raise RuntimeError("cargo metadata does not name the target directory")
    return Path(found[1]) / PROFILE


def write_wheel(directory: Path, compiled: Path) -> str:
    """Writes the wheel from compiled files; returns its name."""
    tag = f"{PYTHON}-{platform()}"
    base = f"{NAME}-{version()}"
    files: list[tuple[str, bytes, int]] = []
    for path in sorted((PACKAGE / NAME).iterdir()):
        if path.suffix in (".py", ".pyi", ".typed") or path.name == "py.typed":
            files.append((f"{NAME}/{path.name}", path.read_bytes(), 0o644))
    module = (compiled / "lib_blockhaul.so").read_bytes()
    files.append((f"{NAME}/_blockhaul.abi3.so", module, 0o755))
    files.append((f"{base}.data/scripts/blockhaul", (compiled / "blockhaul").read_bytes(), 0o755))
    info = f"{base}.dist-info"
    for licence in ("LICENSE-APACHE", "LICENSE-MIT"):
        files.append((f"{info}/licenses/{licence}", (ROOT / licence).read_bytes(), 0o644))
    files.append((f"{info}/METADATA", metadata().encode(), 0o644))
    files.append((f"{info}/WHEEL", wheel_file().encode(), 0o644))
    name = f"{base}-{tag}.whl"
    record = ""
    with zipfile.ZipFile(directory / name, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for path, content, mode in files:
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=")
            record += f"{path},sha256={digest.decode()},{len(content)}\n"
            add(archive, path, content, mode)
        record += f"{info}/RECORD,,\n"
        add(archive, f"{info}/RECORD", record.encode(), 0o644)
    return name


def add(archive: zipfile.ZipFile, path: str, content: bytes, mode: int) -> None:
    """Adds a file with its mode, and without a time: the same sources give the same wheel."""
    entry = zipfile.ZipInfo(path, (1980, 1, 1, 0, 0, 0))
    entry.external_attr = (0o100000 | mode) << 16
    entry.compress_type = zipfile.ZIP_DEFLATED
    archive.writestr(entry, content)


def install(wheel: Path, environment: Path) -> None:
    """Unpacks a wheel into a virtual environment, where pip is missing."""
    packages = next(environment.glob("lib/python3*/site-packages"))
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.infolist():
            scripts = re.fullmatch(r"[^/]+\.data/scripts/([^/]+)", entry.filename)
            path = environment / "bin" / scripts[1] if scripts else packages / entry.filename
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(archive.read(entry))
            path.chmod((entry.external_attr >> 16) & 0o777)


# What a front end calls (PEP 517).


def prepare_metadata_for_build_wheel(
    metadata_directory: str, config_settings: object = None
) -> str:
    """Writes the metadata of the wheel, for which nothing is compiled."""
    info = Path(metadata_directory) / f"{NAME}-{version()}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(metadata())
    (info / "WHEEL").write_text(wheel_file())
    return info.name


def build_wheel(
    wheel_directory: str, config_settings: object = None, metadata_directory: object = None
) -> str:
    """Builds a wheel."""
    return write_wheel(Path(wheel_directory), compile_all())


def build_sdist(sdist_directory: str, config_settings: object = None) -> str:
    """Packs the sources that git knows."""
    base = f"{NAME}-{version()}"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True)
    paths = [path for path in listed.stdout.decode().split("\0") if path]
    info = Path(sdist_directory) / "PKG-INFO"
    info.write_text(metadata())
    with tarfile.open(Path(sdist_directory) / f"{base}.tar.gz", "w:gz") as archive:
        archive.add(info, f"{base}/PKG-INFO")
        for path in paths:
            archive.add(ROOT / path, f"{base}/{path}", recursive=False)
    info.unlink()
    return f"{base}.tar.gz"


def main(words: list[str]) -> None:
    match words:
        case ["wheel", directory]:
            print(write_wheel(Path(directory), compile_all()))
        case ["wheel", directory, "--from", compiled]:
            print(write_wheel(Path(directory), Path(compiled)))
        case ["install", wheel, environment]:
            install(Path(wheel), Path(environment))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
