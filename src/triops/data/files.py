"""Files on a disk or at any fsspec URL: read whole, listed, and written whole or not at all."""

from __future__ import annotations

import itertools
import os
import uuid
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

# Stores in which an object appears when all of it is there: a temporary name would only cost a copy.
_WHOLE_OR_NOTHING = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oci", "oss", "memory"}

# Links of chained URLs that may stand without a path of their own.
_CACHES = ("simplecache", "filecache", "blockcache", "cached")
_ARCHIVES = ("zip", "tar", "libarchive")

# A temporary name is unique among processes (forked ones too) and machines; a name from the system each time is slower.
_PROCESS = uuid.uuid4().hex
_numbers = itertools.count()

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL

Data = bytes | bytearray | memoryview


def is_url(path: str) -> bool:
    """Whether fsspec has to open it.

    >>> is_url("s3://bucket/kitti"), is_url("/data/kitti"), is_url("zip::kitti.zip")
    (True, False, True)
    """
    return "://" in path or path.partition("::")[0] in (*_CACHES, *_ARCHIVES)


def is_chained(path: str) -> bool:
    """Whether it is a URL of several links: a file system that reads another, such as an archive or a cache."""
    return "::" in path and is_url(path)


def join(folder: str, *names: str) -> str:
    """The path of something in a folder. An absolute path or a URL stays what it is.

    >>> join("zip://kitti::s3://bucket/kitti.zip", "training")
    'zip://kitti/training::s3://bucket/kitti.zip'
    """
    for name in names:
        if is_url(name) or (not is_url(folder) and os.path.isabs(name)):
            folder = name
        elif name and is_chained(folder):
            before, path, after = _links(folder)
            folder = f"{before}{_below(path, name)}{after}"
        elif name:
            folder = _below(folder, name)
    return folder


def _below(folder: str, name: str) -> str:
    """A name in a folder that is a local path or a URL of one link; the uppermost one of a URL ends in its slashes."""
    protocol, mark, path = folder.rpartition("://")
    return f"{protocol}{mark}{path.rstrip('/')}/{name}" if path else f"{folder}{name}"


def folder_of(path: str) -> str:
    """The folder that a file is in.

    >>> folder_of("s3://bucket/kitti/kitti_infos_train.pkl")
    's3://bucket/kitti'
    """
    if is_url(path):
        before, url, after = _links(path)
        protocol, _, rest = url.rpartition("://")
        parent = str(PurePosixPath(rest).parent)
        return f"{before}{protocol}{'://' if protocol else ''}{'' if parent == '.' else parent}{after}"
    return os.path.dirname(path)


def name_of(path: str) -> str:
    """The last part of a path, which has the suffix.

    >>> name_of("zip://kitti/kitti_infos_train.pkl::s3://bucket/kitti.zip")
    'kitti_infos_train.pkl'
    """
    return (_links(path)[1] if is_url(path) else path).rpartition("/")[2]


def _links(url: str) -> tuple[str, str, str]:
    """The link of a URL whose path names a file, with what stands before and after it.

    Caches take the path of what they cache; an archive without a path is its uppermost folder.

    >>> _links("simplecache::zip::s3://bucket/kitti.zip")
    ('simplecache::', 'zip://', '::s3://bucket/kitti.zip')
    """
    links = url.split("::")
    at = next((i for i, link in enumerate(links) if link not in _CACHES), len(links) - 1)
    path = f"{links[at]}://" if links[at] in _ARCHIVES else links[at]
    return "".join(f"{link}::" for link in links[:at]), path, "".join(f"::{link}" for link in links[at + 1 :])


def reason(error: OSError) -> str:
    """Which file cannot be read or written, and why.

    >>> reason(PermissionError(13, "Permission denied", "000007.bin"))
    '000007.bin: permission denied'
    """
    if isinstance(error, FileNotFoundError):
        return f"{error.filename or error}: no such file"
    if error.filename is None or error.strerror is None:
        return str(error)
    return f"{error.filename}: {error.strerror[:1].lower()}{error.strerror[1:]}"


def read(path: str) -> bytes:
    """All of a file."""
    if is_url(path):
        system, inside = _system(path)
        try:
            return bytes(system.cat_file(inside))
        except OSError:
            raise
        except Exception as error:  # of a damaged archive, and whatever else is a package's own
            raise OSError(f"{path}: {error}") from None
    with open(path, "rb", buffering=0) as file:
        return file.readall()


def exists(path: str) -> bool:
    if is_url(path):
        system, inside = _system(path)
        return bool(system.exists(inside))
    return os.path.exists(path)


def is_folder(path: str) -> bool:
    if is_url(path):
        system, inside = _system(path)
        return bool(system.isdir(inside))
    return os.path.isdir(path)


def names(folder: str) -> set[str]:
    """Names of the files in a folder; none where it is missing."""
    if is_url(folder):
        system, inside = _system(folder)
        system.invalidate_cache()
        found = system.ls(inside, detail=False) if system.isdir(inside) else []
        return {str(name).rstrip("/").rsplit("/", 1)[-1] for name in found}
    try:
        return set(os.listdir(folder))
    except FileNotFoundError:
        return set()


def make_folder(folder: str) -> None:
    if is_url(folder):
        system, inside = _system(folder)
        system.makedirs(inside, exist_ok=True)
    else:
        os.makedirs(folder, exist_ok=True)


def remove_folder(folder: str) -> None:
    """Remove a folder of files; it may be missing, and others may be removing it too."""
    for name in names(folder):
        remove(join(folder, name))
    try:
        if is_url(folder):
            system, inside = _system(folder)
            system.rmdir(inside)  # an object store has no folders, and does nothing or says so
        else:
            os.rmdir(folder)
    except OSError:
        return


def remove(path: str) -> None:
    """Remove a file; it may be missing."""
    try:
        if is_url(path):
            system, inside = _system(path)
            system.rm_file(inside)
        else:
            os.remove(path)
    except FileNotFoundError:
        return


def write_whole(path: str, data: Data, temporary: str) -> None:
    """Write a file so that nobody ever sees a part of it: under another name in `temporary`, which is then renamed.

    Args:
        temporary: a folder on the same file system.
    """
    if is_url(path):
        system, inside = _system(path)
        if {*([system.protocol] if isinstance(system.protocol, str) else system.protocol)} & _WHOLE_OR_NOTHING:
            system.pipe_file(inside, bytes(data))
            return
    while True:
        try:
            _write_and_rename(path, data, join(temporary, f"{os.getpid()}-{_PROCESS}-{next(_numbers)}"))
        except FileNotFoundError:
            # Another process has ended the job and removed the folder, perhaps with the file in it.
            if not is_folder(folder_of(path)):
                raise
            make_folder(temporary)
            continue
        return


def _write_and_rename(path: str, data: Data, unique: str) -> None:
    if is_url(path):
        system, inside = _system(path)
        _, unique = _system(unique)
        system.pipe_file(unique, bytes(data))
        system.mv(unique, inside)
    else:
        _write_new(unique, data)
        os.replace(unique, path)


def _write_new(path: str, data: Data) -> None:
    """Write a file that is not there yet; of one that cannot be written, nothing is left."""
    handle = os.open(path, _CREATE, 0o666)
    try:
        _write_all(handle, data)
    except BaseException:
        os.close(handle)
        remove(path)
        raise
    os.close(handle)


def write(folder: str, contents: Sequence[tuple[str, Data]]) -> None:
    """Write files, by name and data, that nobody reads before a record says that they are there.

    A file that was there is not emptied first, so that writing the same once more never shows.
    """
    if is_url(folder):
        for name, data in contents:
            system, inside = _system(join(folder, name))
            system.pipe_file(inside, bytes(data))
        return
    # The system looks the folder up once, where it can.
    at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY) if os.open in os.supports_dir_fd else None
    try:
        for name, data in contents:
            path = name if at is not None else f"{folder}/{name}"
            try:
                handle, new = os.open(path, _CREATE, 0o666, dir_fd=at), True
            except FileExistsError:
                handle, new = os.open(path, os.O_WRONLY, dir_fd=at), False
            try:
                _write_all(handle, data)
                if not new:
                    os.ftruncate(handle, len(data))
            finally:
                os.close(handle)
    finally:
        if at is not None:
            os.close(at)


def append(path: str, data: Data) -> None:
    """Add to the end of a file on a disk, which is created if need be."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        _write_all(handle, data)
    finally:
        os.close(handle)


def _write_all(handle: int, data: Data) -> None:
    """data: bytes, or a view of bytes."""
    size = len(data)
    written = os.write(handle, data) if size else 0
    while written < size:
        written += os.write(handle, memoryview(data)[written:])


def _system(path: str) -> tuple[Any, str]:
    """The file system of a URL, which fsspec keeps per process, and the path inside of it."""
    import fsspec  # only URLs need it

    try:
        system, inside = fsspec.core.url_to_fs(path)
    except OSError:
        raise
    except Exception as error:  # the protocol's package is missing, there is no such protocol, a damaged archive
        raise OSError(f"{path}: {error}") from None
    return system, str(inside)
