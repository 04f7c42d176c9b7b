"""Models from the Hugging Face Hub: one GGUF file, or a repository in Hugging Face layout.

Repositories live in the cache that every Hub program shares. A repository that is complete there
is used without opening the network; ``twostep pull`` refreshes it.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import re
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from twostep.contracts.errors import ModelError, ModelNotFoundError, UnsupportedModelError
from twostep.entrypoints import environment
from twostep.entrypoints.catalogue import HubFile
from twostep.entrypoints.progress import Reporter, folder_bytes, format_bytes, watch_folder

DEFAULT_QUANT = "Q4_K_M"
PROBE_SECONDS = 3.0
REQUEST_SECONDS = 10.0
SNAPSHOT_PATTERNS = ("*.json", "*.jinja", "*.model", "*.safetensors", "tokenizer*")
"""Files at the top of a repository that a model needs; never code, never pickles."""

_REPOSITORY = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+?)(?::(?P<quant>[\w.-]+))?", re.ASCII)
_SPLIT = re.compile(r"-\d{5}-of-\d{5}\.gguf$", re.IGNORECASE)


class Repository(msgspec.Struct, frozen=True):
    """``org/name`` or ``org/name:QUANT``."""

    repo: str
    quant: str | None = None

    def __str__(self) -> str:
        return f"{self.repo}:{self.quant}" if self.quant else self.repo


def parse(text: str) -> Repository | None:
    """Read ``org/name[:QUANT]``; None if the text does not have that form."""
    match = _REPOSITORY.fullmatch(text)
    return Repository(match["repo"], match["quant"]) if match else None


def fetch(wanted: Repository, reporter: Reporter, *, refresh: bool = False) -> Path:
    """The model's GGUF file or directory, from the cache or else from the Hub.

    Raises:
        ModelNotFoundError: no such repository or file, or not cached and the network is off.
        UnsupportedModelError: nothing in it that twostep can run.
        ModelError: the Hub does not answer, or the download failed.
    """
    cached = find_cached(wanted)
    if cached is not None and not refresh:
        return cached
    cached = cached or find_cached(wanted, guess=True)
    if environment.is_offline():
        if cached is not None:
            return cached
        raise ModelNotFoundError(
            f"{wanted} is not on disk and the network is switched off (TWOSTEP_OFFLINE or "
            f"HF_HUB_OFFLINE): run `twostep pull {wanted}` once with the network on"
        )
    try:
        require_answer()
    except ModelError as error:
        if cached is None:
            raise
        reporter.note(f"{error}; going on with {cached}")
        return cached
    files = list_files(wanted.repo)
    chosen = choose_files(wanted, list(files))
    snapshot = download(wanted.repo, {name: files[name] for name in chosen}, reporter)
    return snapshot / chosen[0] if chosen[0].lower().endswith(".gguf") else snapshot


def fetch_file(file: HubFile, num_bytes: int, work: Path, reporter: Reporter) -> Path:
    """Download one file into the folder ``work``, outside the shared cache; returns its path."""
    require_answer()
    label = f"{file.filename} from the Hub"
    with (
        reporter.transfer(label, num_bytes) as advance,
        watch_folder(work, advance),
        hub_errors(file.repo),
    ):
        from huggingface_hub import hf_hub_download

        path = hf_hub_download(
            file.repo,
            file.filename,
            revision=file.revision,
            local_dir=work,
            endpoint=environment.hub_endpoint(),
            etag_timeout=REQUEST_SECONDS,
        )
    return Path(path)


# -- the cache ------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """The cache shared by all Hub programs; may not exist yet."""
    if chosen := os.environ.get("HF_HUB_CACHE"):
        return Path(chosen).expanduser()
    if chosen := os.environ.get("HF_HOME"):
        return Path(chosen).expanduser() / "hub"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "huggingface" / "hub"


def find_cached(wanted: Repository, *, guess: bool = False) -> Path | None:
    """The model in the cache if all its files are there. Opens no network.

    Which of a repository's GGUF files is meant by ``org/name`` alone can depend on files that are
    not in the cache; ``guess`` takes what is there.
    """
    folder = cache_folder() / f"models--{wanted.repo.replace('/', '--')}"
    try:
        commit = (folder / "refs" / "main").read_text().strip()
    except OSError:
        return None
    snapshot = folder / "snapshots" / commit
    names = [path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if path.exists()]
    with contextlib.suppress(ModelError):
        chosen = choose_files(wanted, names)[0]
        if not chosen.lower().endswith(".gguf"):
            return None if missing_shards(snapshot) else snapshot
        if guess or wanted.quant or has_quant(chosen, DEFAULT_QUANT):
            return snapshot / chosen
    return None


def missing_shards(snapshot: Path) -> list[str]:
    """Weight files that the index of a sharded model names and that are not there."""
    index = snapshot / "model.safetensors.index.json"
    if not index.exists():
        return []
    try:
        shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        return [index.name]  # half written: fetch it again
    return [name for name in shards if not (snapshot / name).exists()]


# -- which files ----------------------------------------------------------------------------------


def choose_files(wanted: Repository, names: Sequence[str]) -> list[str]:
    """The files to fetch: one GGUF file, or all of a model in Hugging Face layout."""
    has_weights = any("/" not in name and name.endswith(".safetensors") for name in names)
    if wanted.quant is None and has_weights and "config.json" in names:
        return [
            name
            for name in names
            if "/" not in name and any(fnmatch.fnmatch(name, p) for p in SNAPSHOT_PATTERNS)
        ]
    return [choose_gguf(wanted, names)]


def choose_gguf(wanted: Repository, names: Sequence[str]) -> str:
    """The one GGUF file meant: by quantisation, else the only one, else Q4_K_M."""
    every = sorted(n for n in names if n.lower().endswith(".gguf") and "mmproj" not in n.lower())
    if not every:
        raise UnsupportedModelError(
            f"{wanted.repo} has no .gguf file and no config.json with .safetensors weights; "
            "choose a repository that has one of them"
        )
    whole = [name for name in every if not _SPLIT.search(name)]
    quant = wanted.quant or (None if len(whole) == 1 else DEFAULT_QUANT)
    matches = [name for name in whole if quant is None or has_quant(name, quant)]
    if len(matches) == 1:
        return matches[0]
    if any(quant and has_quant(_SPLIT.sub(".gguf", name), quant) for name in every) and not matches:
        raise UnsupportedModelError(
            f"{wanted} is split over several .gguf files: merge them into one and give its path"
        )
    listed = ", ".join(matches or whole or every)
    problem = "fits several files" if matches else f"has no {quant} file"
    raise ModelNotFoundError(f"{wanted} {problem}: add :QUANT for one of {listed}")


def has_quant(name: str, quant: str) -> bool:
    """Whether a file name says that quantisation, as a word of its own."""
    words = rf"(?:^|[-._/]){re.escape(quant)}(?:[-.]|$)"
    return re.search(words, name, re.IGNORECASE) is not None


# -- the network ----------------------------------------------------------------------------------


def require_answer() -> None:
    """Raise, within a few seconds, unless the Hub answers."""
    endpoint = environment.hub_endpoint()
    if not is_reachable(endpoint):
        raise ModelError(
            f"the Hub ({endpoint}) does not answer: check the network, proxy or HF_ENDPOINT"
        )


def is_reachable(endpoint: str, seconds: float = PROBE_SECONDS) -> bool:
    """Whether a server answers there, whatever it says. One try, and a time limit on all of it.

    The look-up of a name can block for longer than any socket time-out, hence the thread.
    """
    answered: list[bool] = []
    thread = threading.Thread(
        target=_probe, args=(endpoint, seconds, answered), name="twostep-probe", daemon=True
    )
    thread.start()
    thread.join(seconds)
    return bool(answered)


def _probe(endpoint: str, seconds: float, answered: list[bool]) -> None:
    # A start with a model on disk must not pay for loading these.
    import ssl
    import urllib.error
    import urllib.request

    request = urllib.request.Request(endpoint, method="HEAD")
    try:
        urllib.request.urlopen(request, timeout=seconds).close()
    except urllib.error.HTTPError as error:
        error.close()  # an answer all the same
    except urllib.error.URLError as error:
        # The Hub client has certificates of its own: let it judge them.
        if not isinstance(error.reason, ssl.SSLError):
            return
    except (OSError, ValueError):
        return
    answered.append(True)


def list_files(repo: str) -> dict[str, int]:
    """The repository's files and their sizes in bytes."""
    with hub_errors(repo):
        from huggingface_hub import HfApi

        api = HfApi(endpoint=environment.hub_endpoint())
        info = api.model_info(repo, files_metadata=True, timeout=REQUEST_SECONDS)
    return {file.rfilename: file.size or 0 for file in info.siblings or []}


def download(repo: str, files: Mapping[str, int], reporter: Reporter) -> Path:
    """Fetch those files (names and sizes) into the shared cache; returns the snapshot's folder."""
    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    blobs = cache / f"models--{repo.replace('/', '--')}" / "blobs"
    before = folder_bytes(blobs)
    total = sum(files.values())
    free = shutil.disk_usage(cache).free
    if free < total - before:
        raise ModelError(
            f"not enough disk space in {cache}: {repo} needs {format_bytes(total)}, "
            f"{format_bytes(free)} free; free some or set HF_HOME to a larger disk"
        )
    with (
        reporter.transfer(f"{repo} from the Hub", total) as advance,
        watch_folder(blobs, lambda size: advance(max(size - before, 0))),
        hub_errors(repo),
    ):
        from huggingface_hub import snapshot_download

        return Path(
            snapshot_download(
                repo,
                allow_patterns=list(files),
                cache_dir=cache,
                endpoint=environment.hub_endpoint(),
                etag_timeout=REQUEST_SECONDS,
            )
        )


@contextlib.contextmanager
def hub_errors(repo: str) -> Iterator[None]:
    """Quiet the Hub client's own bars and turn its errors into one line with a cure."""
    from huggingface_hub import errors, utils

    # The package re-exports these three without saying so to type checkers.
    # The library exports these three lazily, where type checkers do not see them.
    had_bars = not utils.are_progress_bars_disabled()  # type: ignore[attr-defined]
    if had_bars:
        utils.disable_progress_bars()  # type: ignore[attr-defined]
    try:
        yield
    except errors.GatedRepoError as error:
        raise ModelNotFoundError(
            f"{repo} is gated: accept its terms on {environment.hub_endpoint()}/{repo} "
            "and set HF_TOKEN"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelNotFoundError(
            f"the Hub has no repository {repo}, or it is private: check the name, or set HF_TOKEN"
        ) from error
    except errors.EntryNotFoundError as error:
        raise ModelNotFoundError(f"{repo} lacks a file: {first_line(error)}") from error
    except Exception as error:  # the client lets errors of its HTTP library through
        raise ModelError(
            f"cannot fetch {repo} from the Hub: {first_line(error)}; try again later"
        ) from error
    finally:
        if had_bars:
            utils.enable_progress_bars()  # type: ignore[attr-defined]


def first_line(error: BaseException) -> str:
    """What an error of another library says, in one line."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
