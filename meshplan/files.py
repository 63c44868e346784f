"""Read files written by people and other programs, and write files atomically.

Only a regular file of a bounded size is read: a device or a pipe may never end. A written file
appears completely or not at all, whatever happens meanwhile: a full disk, a killed process,
another process that writes the same file, a link that another user created under its name.
"""

from __future__ import annotations

import hashlib
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

from meshplan.errors import Origin, Problem, SpecError

CACHE_VARIABLE: Final = "MESHPLAN_CACHE"
"""Environment variable that names the folder of what meshplan keeps for itself; "off" for none."""
ELSEWHERE: Final = "give a path in an existing folder that you can write to"
"""The fix that is suggested when a file cannot be written."""


def read_bytes(path: str | os.PathLike[str], most: int, what: str) -> bytes:
    """Return the content of a regular file.

    Args:
        path: The file.
        most: Maximum size in bytes.
        what: The expected content, with an article, for messages: "a plan".

    Raises:
        FileNotFoundError: The file does not exist.
        SpecError: The file is not a regular file, is too large, or cannot be read.
    """
    origin = Origin(os.fspath(path))
    try:
        _check_regular(os.stat(path), what, origin)  # Opening a device may have side effects.
        # O_NONBLOCK: if the file became a pipe after `stat`, opening it would block.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            _check_regular(status, what, origin)
            data = file.read(most + 1) if status.st_size <= most else b""
    except (FileNotFoundError, SpecError):
        raise
    except (OSError, ValueError) as error:  # ValueError: a name with a null byte.
        reason = getattr(error, "strerror", None) or "its name is not valid"
        raise SpecError(Problem(f"the file cannot be read: {reason}", origin)) from None
    size = max(status.st_size, len(data))
    if size > most:
        problem = f"the file has {size:,} bytes, but {what} has at most {most:,}"
        raise SpecError(Problem(problem, origin, f"name {what} file"))
    return data


def _check_regular(status: os.stat_result, what: str, origin: Origin) -> None:
    if not stat.S_ISREG(status.st_mode):
        is_folder = stat.S_ISDIR(status.st_mode)
        problem = f"this is a directory, not {what}" if is_folder else "this is not a regular file"
        raise SpecError(Problem(problem, origin, f"name {what} file"))


def write_bytes(path: str | os.PathLike[str], data: bytes, what: str, fix: str = ELSEWHERE) -> None:
    """Write a file atomically: a reader finds either the old content or all of the new content.

    The content is written to a temporary file in the same folder and flushed to disk; then the
    temporary file is renamed to `path`. If `path` is a symbolic link, the link itself is replaced.

    Args:
        path: The file to write.
        data: The whole content.
        what: The content, with an article, for messages: "the lock".
        fix: The fix that the error suggests.

    Raises:
        SpecError: The file cannot be written; a file that existed before is unchanged.
    """
    target = Path(path)
    try:
        beside = target.with_name(f".{target.name[:200]}.{os.urandom(8).hex()}.tmp")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            handle = os.open(beside, flags, 0o666)
            try:
                _keep_permissions(target, handle)
                write_all(handle, data)
                os.fsync(handle)
            finally:
                os.close(handle)  # Some file systems report a full disk only here.
            os.replace(beside, target)
        except BaseException:
            with suppress(OSError):  # The earlier error is the one to report.
                os.unlink(beside)
            raise
        sync_folder(target.parent)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "its name is not valid"
        problem = Problem(f"{what} cannot be written: {reason}", Origin(os.fspath(path)), fix)
        raise SpecError(problem) from None


def write_all(handle: int, data: bytes) -> None:
    """Write all of `data`, with several calls if `os.write` accepts only a part of it."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(handle, rest) :]


def check_writable(path: str | os.PathLike[str], what: str, fix: str = ELSEWHERE) -> None:
    """Check that `write_bytes` can write to a path, before the content is computed.

    Args:
        path: The file to write later.
        what: The content, with an article, for messages: "the picture".
        fix: The fix that the error suggests.

    Raises:
        SpecError: The folder does not exist, or the path is a folder or a device.
    """
    problem = ""
    if not os.path.isdir(os.path.dirname(path) or os.curdir):
        problem = "its folder does not exist"
    elif os.path.isdir(path):
        problem = "this is a folder, not a file"
    elif os.path.exists(path) and not os.path.isfile(path):
        problem = "this is a device, not a file"
    if problem:
        raise SpecError(Problem(f"{what} cannot be written: {problem}", Origin(str(path)), fix))


def _keep_permissions(target: Path, handle: int) -> None:
    """Give the new file, while it is still empty, the permissions of the file that it replaces."""
    with suppress(FileNotFoundError):
        status = os.lstat(target)
        if stat.S_ISREG(status.st_mode):
            os.fchmod(handle, stat.S_IMODE(status.st_mode))


def sync_folder(folder: Path) -> None:
    """Flush a rename inside the folder to disk, if the file system supports this."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


class DiskCache:
    """Files that meshplan keeps for itself, each with a hash of its content.

    A file of another user, or which others may write, is not read, nor one that was cut short or
    changed. A folder that cannot be written is no error: nothing is kept then.

    Args:
        folder: The folder; it is made when the first file is kept.
        suffix: Suffix of the names of these files; the folder may hold others.
        most: Number of files that are kept; the oldest are removed.
    """

    def __init__(self, folder: Path, suffix: str, most: int) -> None:
        self.folder, self._suffix, self._most = folder, suffix, most

    @classmethod
    def of_user(cls, suffix: str, most: int) -> DiskCache | None:
        """Return the cache in the folder that the environment names; None if it is turned off."""
        stated = os.environ.get(CACHE_VARIABLE, "")
        home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        folder = stated or os.path.join(home, "meshplan")
        if stated == "off" or folder.startswith("~"):  # The user has no home.
            return None
        return cls(Path(folder), suffix, most)

    def get(self, name: str) -> tuple[bytes, float] | None:
        """Return (content, time of its writing in seconds since 1970); None if there is none."""
        try:
            handle = os.open(self.folder / (name + self._suffix), os.O_RDONLY | os.O_NOFOLLOW)
        except OSError:
            return None
        with os.fdopen(handle, "rb") as file:
            status = os.fstat(file.fileno())
            if not _is_own(status):
                return None
            hashed, data = file.read(hashlib.sha256().digest_size), file.read()
        return (data, status.st_mtime) if hashlib.sha256(data).digest() == hashed else None

    def put(self, name: str, data: bytes) -> None:
        """Keep a file, if the folder can be written, and remove the oldest ones."""
        path = self.folder / (name + self._suffix)
        with suppress(OSError, SpecError):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_bytes(path, hashlib.sha256(data).digest() + data, "what is kept")
            path.chmod(0o600)
            kept = self.folder.glob(f"*{self._suffix}")
            for old in sorted(kept, key=lambda each: each.stat().st_mtime)[: -self._most]:
                old.unlink()


def _is_own(status: os.stat_result) -> bool:
    """Return True if a file belongs to this user, who alone may write it."""
    if os.name == "nt":
        return True
    return status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
