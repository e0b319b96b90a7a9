"""Where a node keeps its things: the home, its run and log folders, the shared cache, the models.

~/.mesh-llm   (MESH_LLM_HOME)    identity, run/, logs/: one running node each
~/.cache/mesh-llm (MESH_LLM_CACHE)   built libraries, shared by all homes
~/.models     (MESH_LLM_MODELS)  GGUF files
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import secrets
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mesh_llm.errors import HomeInUse, MeshError
from mesh_llm.types import NodeId

UNIX_SOCKET_PATH_BYTES = 100
"""The kernel takes 107 on Linux and 103 on macOS."""


_RUNTIME = "/run/user/{user}"
"""Made by systemd for each user who is logged in."""
_LONGEST_SOCKET = f"{'0' * 16}-control.sock"


def cache_folder() -> Path:
    if named := os.environ.get("MESH_LLM_CACHE"):
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "mesh-llm"


def models_folder() -> Path:
    return Path(os.environ.get("MESH_LLM_MODELS", "~/.models")).expanduser()


def default_home() -> Path:
    return Path(os.environ.get("MESH_LLM_HOME", "~/.mesh-llm")).expanduser()


def demo_home() -> Path:
    """Of the first node of `mesh-llm demo`."""
    return default_home() / "demo"


def noted_homes() -> list[Home]:
    """Homes on which nodes of this user run, wherever they are; one that was killed is still noted."""
    found = []
    for folder in filter(_is_private, _run_folders()):
        for note in folder.glob("*-home"):
            if note.exists():
                found.append(Home(note.readlink()))
            else:
                note.unlink(missing_ok=True)
    return found


def link_door(node: NodeId) -> Path:
    """Where a node lets in links of its neighbours on this machine: known by its id, told by nobody."""
    return _socket(f"{node[:16]}-links.sock")


def _socket(name: str) -> Path:
    """A socket outside of any home. Looked for in all folders: one that was taken may be free by now."""
    private = (folder for folder in _run_folders() if _is_private(folder))
    found = next((folder / name for folder in private if (folder / name).exists()), None)
    return found or _private_run_folder() / name


def _run_folders() -> tuple[Path, ...]:
    """Where sockets may lie, the same for all nodes of a user whatever their homes.

    Anybody can make the first one before we do, and then it is not private; nobody else can make
    the others. It is the first all the same: a session's folder is removed when its user logs out,
    and a node may run on; a cache folder may be on a network disk, or have too long a path.
    """
    user = os.getuid()
    shared = Path(tempfile.gettempdir()) / f"mesh-llm-{user}"
    # Not by XDG_RUNTIME_DIR: a service of the same user has none.
    session = Path(_RUNTIME.format(user=user)) / "mesh-llm"
    return shared, session, cache_folder() / "run"


def _private_run_folder() -> Path:
    """The first that is ours alone, made if need be."""
    folders = _run_folders()
    for folder in folders:
        with suppress(OSError):
            # With parents only in the cache: of the others these are the system's to make.
            folder.mkdir(mode=0o700, parents=folder == folders[-1], exist_ok=True)
        if _is_private(folder):
            return folder
    raise MeshError(
        f"{folders[0]} would hold sockets, but it is not a private folder of yours",
        hint="remove it, or name a folder of your own in TMPDIR",
    )


def _is_private(folder: Path) -> bool:
    try:
        # Of the path itself: whoever made a symbolic link can lead it elsewhere.
        found = folder.lstat()
    except OSError:
        return False
    fits = len(os.fsencode(folder / _LONGEST_SOCKET)) <= UNIX_SOCKET_PATH_BYTES
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077 and fits


class Home:
    """One node's state on disk. Private to its owner: it holds the node's key and its control socket."""

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser().absolute()

    @property
    def run_folder(self) -> Path:
        return self.path / "run"

    @property
    def log_folder(self) -> Path:
        return self.path / "logs"

    @property
    def control_socket(self) -> Path:
        """In run/, unless that path is longer than a unix socket's may be."""
        socket = self.run_folder / "control.sock"
        if len(os.fsencode(socket)) <= UNIX_SOCKET_PATH_BYTES:
            return socket
        return _socket(f"{self._short}-control.sock")

    @property
    def _short(self) -> str:
        return hashlib.sha256(os.fsencode(self.path)).hexdigest()[:16]

    @property
    def _note(self) -> Path:
        """By which commands find a node that runs, whatever its home."""
        return _socket(f"{self._short}-home")

    @property
    def mesh_file(self) -> Path:
        """Which mesh this node is in, by what right, and whom it invited: secrets are in it."""
        return self.path / "mesh.json"

    @property
    def worker_socket(self) -> Path:
        """Where the worker child is handed its links."""
        return self.control_socket.with_name(self.control_socket.name.replace("control", "worker"))

    @property
    def experience_file(self) -> Path:
        """What plans have shown that ran here, for the next prediction."""
        return self.path / "experience.json"

    @property
    def keys_file(self) -> Path:
        """API keys with names, as salted hashes; it need not be there."""
        return self.path / "keys.json"

    @property
    def key_usage_file(self) -> Path:
        """What was asked with each of them."""
        return self.path / "key-usage.json"

    @property
    def certificate_file(self) -> Path:
        """For guests on the local network, with its key; it need not be there."""
        return self.path / "share-certificate.pem"

    @property
    def catalog_file(self) -> Path:
        """Models that its owner has given names to; it need not be there."""
        return self.path / "catalog.toml"

    @property
    def catalog_update_file(self) -> Path:
        """A list that `mesh-llm catalog update` brought, as it was signed; it need not be there."""
        return self.path / "catalog-update.toml"

    @property
    def catalog_source_file(self) -> Path:
        """Where that came from, and whose signature it bears."""
        return self.path / "catalog-update.json"

    @property
    def catalog_files(self) -> tuple[Path, Path]:
        """Lists that stand before mesh-llm's own, the first before the second."""
        return self.catalog_file, self.catalog_update_file

    @property
    def config_file(self) -> Path:
        """Options that its owner does not want to type each time; it need not be there."""
        return self.path / "config.toml"

    def read_mesh(self) -> dict[str, Any] | None:
        try:
            document = json.loads(self.mesh_file.read_text())
        except FileNotFoundError:
            return None
        except ValueError:
            document = None
        if not isinstance(document, dict):
            raise MeshError(
                f"{self.mesh_file} is damaged",
                hint="join again with a new token, or start afresh with --new-mesh",
            )
        return document

    def write_mesh(self, document: dict[str, Any]) -> None:
        write_private(self.mesh_file, json.dumps(document))

    def forget_mesh(self) -> None:
        """And the key: a mesh is known by its creator's, and the next one is to be another."""
        self.mesh_file.unlink(missing_ok=True)
        (self.path / "identity").unlink(missing_ok=True)

    def create(self) -> None:
        try:
            for folder in (self.path, self.run_folder, self.log_folder):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                _check_writable(folder)
        except OSError as error:
            raise MeshError(
                f"cannot create {error.filename or self.path}: {error.strerror}",
                hint="choose another folder with --home or MESH_LLM_HOME",
            ) from error
        owner = self.run_folder.stat()
        if owner.st_uid != os.getuid() or owner.st_mode & 0o077:
            raise MeshError(
                f"{self.run_folder} would hold this node's sockets, but other users can open it",
                hint=f"chmod 700 {self.run_folder}",
            )
        _private_run_folder()  # where others look for its door: it has to be there, or it is said now

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold this home for one node. The kernel lets go of it however the node ends."""
        self.create()
        path = self.run_folder / "node.lock"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = _holder(descriptor)
                raise HomeInUse(
                    f"{self.path} is in use by the node with pid {holder}",
                    hint="mesh-llm stop ends it; --home DIR starts a second node beside it",
                ) from None
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps({"pid": os.getpid(), "started": time.time()}).encode(), 0)
            with suppress(FileNotFoundError):
                self.control_socket.unlink()
            with suppress(FileExistsError):
                self._note.symlink_to(self.path)
            yield
        finally:
            if _is_locked_by_us(descriptor):
                self.control_socket.unlink(missing_ok=True)
                self._note.unlink(missing_ok=True)
            os.close(descriptor)

    def secret(self) -> bytes:
        """The 32 bytes that this node's key is made of; made once, and they never leave the home."""
        path = self.path / "identity"
        try:
            secret = bytes.fromhex(path.read_text())
        except FileNotFoundError:
            secret = secrets.token_bytes(32)
            self.write_secret(secret)
        except ValueError:
            secret = b""
        if len(secret) != 32:
            raise MeshError(
                f"{path} is damaged: it should hold 64 hexadecimal digits",
                hint=f"restore it from a backup, or remove it to become a new node: rm {path}",
            )
        return secret

    def write_secret(self, secret: bytes) -> None:
        write_private(self.path / "identity", secret.hex())

    def begin_anew(self, secret: bytes, document: dict[str, Any]) -> None:
        """In another mesh, with another key; on a full disk all stays as it is.

        The record goes first: a home is never left with the key of one mesh and the record of another.
        """
        texts = {self.path / "identity": secret.hex(), self.mesh_file: json.dumps(document)}
        write_whole(texts, mode=0o600, before=self.forget_mesh)


def _check_writable(folder: Path) -> None:
    """One of an earlier run may lie on a disk that is read-only by now."""
    if not os.access(folder, os.W_OK):
        read_only = os.statvfs(folder).f_flag & os.ST_RDONLY
        raise MeshError(
            f"{folder} cannot be written to: {os.strerror(errno.EROFS if read_only else errno.EACCES)}",
            hint="choose another folder with --home or MESH_LLM_HOME",
        )


def write_private(path: Path, text: str) -> None:
    """Whole or not at all, and never readable by others, not even for a moment."""
    write_whole({path: text}, mode=0o600)


def write_whole(
    texts: Mapping[Path, str], *, mode: int = 0o666, before: Callable[[], None] = lambda: None
) -> None:
    """All of these files or none, as far as a full disk goes: room is taken before any of them is changed.

    `before`: what is to happen between that and the first change.
    """
    scratches: dict[Path, Path] = {}
    try:
        for path, text in texts.items():
            scratch = path.with_name(f".{path.name}.{os.getpid()}")
            scratches[scratch] = path
            _write(scratch, text, mode=mode, named=path)
        before()
        for scratch, path in scratches.items():
            scratch.replace(path)
    except BaseException:
        for scratch in scratches:
            with suppress(OSError):
                scratch.unlink(missing_ok=True)
        raise


def _write(scratch: Path, text: str, *, mode: int, named: Path) -> None:
    try:
        descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        # The system does not say which file had no room, and a scratch file's name means nothing to anybody.
        raise OSError(error.errno, error.strerror, str(named)) from error


def _holder(descriptor: int) -> str:
    try:
        return str(json.loads(os.pread(descriptor, 256, 0))["pid"])
    except (ValueError, KeyError):
        return "unknown"


def _is_locked_by_us(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EAGAIN):
            return False
        raise
    return True
