"""Where traces are: paths and URIs to the files behind them, and the one place that knows file systems.

| trace                         | opened by                                                                   |
|-------------------------------|-----------------------------------------------------------------------------|
| `run/`, `file:///data/run`    | this machine                                                                |
| `s3://…`, `s3a://…`           | Arrow; credentials, region and endpoint from the environment (`AWS_…`)      |
| `gs://…`                      | Arrow; Google's application default credentials                             |
| `hdfs://…`                    | Arrow if it finds libhdfs, otherwise Spark                                  |
| `viewfs://…`, `abfss://…`, …  | Spark (`only_spark_opens`), with the file systems that its Hadoop knows     |

A trace is a string, in the driver and in workers, which open files by the same functions. Local files are absolute
paths, because workers may run in another folder. Errors are TraceErrors of one line that names the URI and the remedy.
"""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from srtm.errors import TraceError
from srtm.workload import delta

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    Trace = str | Path

_URI = re.compile(r"([a-z][a-z0-9+.-]+):(/.*)", re.DOTALL | re.IGNORECASE)
_LOCAL_URI = re.compile(r"(?://(?:localhost)?(?=/))?(/(?!/).*)", re.DOTALL)
_IN_TABLES = re.compile(r"/_delta_log(?:/|$)|/metadata/[^/]*\.metadata\.json$")
_BUCKETS = {"s3": "s3", "s3a": "s3", "s3n": "s3", "gs": "gs", "gcs": "gs"}
_HADOOP = ("hdfs", "viewfs", "webhdfs", "abfs", "abfss", "wasb", "wasbs", "dbfs")
_KNOWN = "file, s3, s3a, gs, hdfs"
_AT_ONCE = 16  # footers
_CONNECT_S, _REQUEST_S, _ATTEMPTS = 10, 30, 3
_HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"
_NO_LIBHDFS = "Unable to load lib"
_STORES = ("s3://", "gs://")
_NO_BUCKET = "its bucket does not exist: check the name, and the server if you set its address"
_SERVER_ERRORS = (
    ("NO_SUCH_BUCKET|[Bb]ucket '[^']*' not found", _NO_BUCKET),
    (
        "INVALID_ACCESS_KEY_ID|SIGNATURE_DOES_NOT_MATCH|TOKEN|UNRECOGNIZED_CLIENT|MISSING_AUTH",
        "the credentials are not valid: check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN",
    ),
    (
        "ACCESS_DENIED|HTTP status 403",
        "permission denied: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, of a user who may read it",
    ),
    ("HTTP status 301|PERMANENT_REDIRECT", "its bucket is in another region: set AWS_REGION"),
    ("AWS Error NETWORK_CONNECTION", "its server does not answer: check AWS_ENDPOINT_URL, AWS_REGION and the network"),
    (
        "google::cloud::Status.(?:UNAUTHENTICATED|PERMISSION_DENIED)|Could not create a OAuth2 access token",
        "permission denied: set GOOGLE_APPLICATION_CREDENTIALS to the key file of an account that may read it",
    ),
    ("google::cloud::Status.(?:UNAVAILABLE|DEADLINE_EXCEEDED)", "its server does not answer: check the network"),
)


class Location(NamedTuple):
    """A file system and a path in it; `prefix` makes a URI of its paths."""

    files: fs.FileSystem
    path: str
    prefix: str = ""


def files_of(trace: Trace) -> list[str]:
    """The Parquet files of a trace: the file itself, or those of the folder in order of name."""
    place = located(trace)
    with explained(str(trace)):
        info = place.files.get_file_info(place.path)
        if info.type == fs.FileType.NotFound:
            raise _missing(str(trace), place)
        if info.type != fs.FileType.Directory:
            return [place.prefix + place.path]
        inside = place.files.get_file_info(fs.FileSelector(place.path, recursive=True))
        if any(entry.path == f"{place.path}/{delta.LOG}" for entry in inside):
            active = delta.active_files(place.files, place.path, str(trace))
            if not active:
                raise TraceError(f"{trace} is a Delta table without files", path=str(trace))
            return [place.prefix + path for path in active]
    if any(_IN_TABLES.search(entry.path, len(place.path)) for entry in inside):
        remedy = "pass the DataFrame that Spark reads from it to the function in Python"
        told = f"{trace} is an Iceberg table or holds tables, which also keep files that they no longer use: {remedy}"
        raise TraceError(told, path=str(trace))
    paths = [
        entry.path
        for entry in inside
        if entry.type == fs.FileType.File and entry.path.endswith(".parquet") and not _is_hidden(entry.path, place.path)
    ]
    if not paths:
        raise TraceError(f"folder {trace} holds no .parquet file", path=str(trace))
    return [place.prefix + path for path in sorted(paths, key=lambda path: path.split("/"))]


def _missing(trace: str, place: Location) -> TraceError:
    if place.prefix in _STORES:
        bucket = place.path.partition("/")[0]
        if place.files.get_file_info(bucket).type == fs.FileType.NotFound:
            return TraceError(f"cannot read {trace}: {_NO_BUCKET}", path=trace)
        return TraceError(f"no trace at {trace}: bucket {bucket} holds nothing of that name", path=trace)
    return TraceError(f"no trace at {trace}: check the {'URI' if _URI.fullmatch(trace) else 'path'}", path=trace)


def _is_hidden(path: str, folder: str) -> bool:
    """Whether a file is in a folder of a writer's own, such as _temporary."""
    return any(name.startswith(("_", ".")) for name in path[len(folder) :].strip("/").split("/")[:-1])


def absolute(trace: Trace) -> str:
    """The trace as a string that means the same in workers, which may run in another folder."""
    place = located(trace)
    return place.prefix + place.path


def is_remote(trace: Trace) -> bool:
    """Whether the trace is not among this machine's files."""
    return (found := _URI.fullmatch(str(trace))) is not None and found[1].lower() != "file"


def only_spark_opens(trace: Trace) -> bool:
    """Whether a trace has a scheme of Hadoop's that Arrow cannot open here."""
    found = _URI.fullmatch(str(trace))
    if not found or (scheme := found[1].lower()) not in _HADOOP:
        return False
    return scheme != "hdfs" or _hdfs(found[2]) is None


def partitions(file: str) -> dict[str, str | None]:
    """The columns that folders of a file's path name, as Hive's layout has it: `topic=a%2Fb/…` is the topic a/b."""
    pairs = [name.partition("=") for name in file.split("/")[:-1]]
    return {
        unquote(name): None if value == _HIVE_NULL else unquote(value)
        for name, equals, value in pairs
        if name and equals
    }


@contextmanager
def parquet(file: str, dictionaries: Sequence[str] = ()) -> Iterator[pq.ParquetFile]:
    """An open Parquet file of `files_of`; some columns, if it has them, are read as dictionaries."""
    place = located(file)
    with place.files.open_input_file(place.path) as stream:
        known = pq.read_metadata(stream)
        encoded = [name for name in dictionaries if name in known.schema.names]
        remote = bool(place.prefix)
        with pq.ParquetFile(stream, metadata=known, read_dictionary=encoded, pre_buffer=remote) as opened:
            yield opened


def footers_of(trace: Trace) -> dict[str, Any]:
    """The footer of every file of a trace, many read at a time: most of the time goes into waiting for answers."""
    files = files_of(trace)
    with ThreadPoolExecutor(max_workers=min(_AT_ONCE, len(files))) as threads:
        return dict(zip(files, threads.map(_footer, files), strict=True))


def _footer(file: str) -> Any:
    place = located(file)
    with explained(file), place.files.open_input_file(place.path) as stream:
        return pq.read_metadata(stream)


@contextmanager
def explained(uri: str) -> Iterator[None]:
    """Errors of file systems and of Parquet as TraceErrors."""
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        said = str(error).partition("\n")[0]
        for pattern, meaning in _SERVER_ERRORS:
            if re.search(pattern, said):
                raise TraceError(f"cannot read {uri}: {meaning}", path=uri) from None
        if isinstance(error, PermissionError):
            raise TraceError(f"cannot read {uri}: permission denied; allow your user to read it", path=uri) from None
        raise TraceError(f"{uri} is not a readable Parquet file: {said}", path=uri) from None


def located(trace: Trace) -> Location:
    """The file system and the path of a trace."""
    found = _URI.fullmatch(str(trace))
    if not found:
        return Location(_local(), str(Path(trace).absolute()))
    scheme, rest = found[1].lower(), found[2]
    if scheme == "file":
        if not (local := _LOCAL_URI.fullmatch(rest)):
            raise TraceError(f"{trace} names another host: write file:///path for a file of this machine")
        literal, path = local[1].rstrip("/") or "/", unquote(local[1]).rstrip("/") or "/"
        # Hive's folders have escapes in their own names, and not everybody escapes these again.
        return Location(_local(), literal if Path(literal).exists() and not Path(path).exists() else path)
    if scheme in _BUCKETS:
        path = rest.strip("/")
        if not path:
            raise TraceError(f"{trace} names no bucket: write {scheme}://bucket/path")
        kind, bucket = _BUCKETS[scheme], path.partition("/")[0]
        with explained(str(trace)):
            files = _s3(bucket, _settings("AWS_")) if kind == "s3" else _gs(_settings("STORAGE_EMULATOR_HOST"))
        return Location(files, path, f"{kind}://")
    if scheme == "hdfs" and (files := _hdfs(rest)) is not None:
        host, _, path = rest.lstrip("/").partition("/") if rest.startswith("//") else ("", "", rest.lstrip("/"))
        return Location(files, f"/{path}".rstrip("/") or "/", f"hdfs://{host}")
    if scheme in _HADOOP:
        raise TraceError(f"{trace} can only be read by Spark: pass spark.read.parquet({str(trace)!r})", path=str(trace))
    raise TraceError(f"cannot read {trace}: unknown scheme {scheme!r}; known schemes: {_KNOWN}", path=str(trace))


def _settings(prefix: str) -> tuple[tuple[str, str], ...]:
    """The variables of the environment that a file system depends on: if they change, it must be made anew."""
    return tuple(sorted((name, value) for name, value in os.environ.items() if name.startswith(prefix)))


@lru_cache(maxsize=1)
def _local() -> fs.FileSystem:
    return fs.LocalFileSystem()


@lru_cache(maxsize=8)
def _s3(bucket: str, settings: tuple[tuple[str, str], ...]) -> fs.FileSystem:
    """S3, or a server that speaks its protocol. Arrow reads credentials by itself, but neither endpoint nor region."""
    given = dict(settings)
    endpoint = given.get("AWS_ENDPOINT_URL_S3") or given.get("AWS_ENDPOINT_URL") or ""
    region = given.get("AWS_REGION") or given.get("AWS_DEFAULT_REGION")
    server = urlsplit(endpoint if "://" in endpoint else f"https://{endpoint}")
    if not region:
        region = "us-east-1" if endpoint else fs.resolve_s3_region(bucket)
    return fs.S3FileSystem(
        endpoint_override=server.netloc + server.path.rstrip("/") or None,
        scheme=server.scheme,
        region=region,
        connect_timeout=_CONNECT_S,
        request_timeout=_REQUEST_S,
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=_ATTEMPTS),
    )


@lru_cache(maxsize=1)
def _gs(settings: tuple[tuple[str, str], ...]) -> fs.FileSystem:
    """Google Cloud Storage, or the emulator that STORAGE_EMULATOR_HOST names, which asks for no credentials."""
    emulator = dict(settings).get("STORAGE_EMULATOR_HOST", "")
    limit = timedelta(seconds=_REQUEST_S)
    if not emulator:
        return fs.GcsFileSystem(retry_time_limit=limit)
    server = urlsplit(emulator if "://" in emulator else f"http://{emulator}")
    return fs.GcsFileSystem(
        anonymous=True, scheme=server.scheme, endpoint_override=server.netloc, retry_time_limit=limit
    )


@lru_cache(maxsize=8)
def _hdfs(rest: str) -> fs.FileSystem | None:
    """HDFS by libhdfs; None without it."""
    host = rest[2:].partition("/")[0] if rest.startswith("//") else ""
    with explained(f"hdfs:{rest}"):
        try:
            return fs.HadoopFileSystem.from_uri(f"hdfs://{host or 'default'}")
        except OSError as error:
            if _NO_LIBHDFS in str(error):
                return None
            raise
