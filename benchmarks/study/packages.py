"""The packages whose text the study trains on, and how to get and read them.

Debian's packages come through `apt-get download`, Python's through `pip download`, from whatever registries those are
set up with. A lock file holds every package's version and digest: with it, the same files are asked for again and
anything else is refused; without it, the newest versions are taken and written down.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Literal

from nstrain.base.errors import Refusal

Form = Literal["plain", "html", "roff"]
Source = Literal["python", "c", "go", "english", "languages", "formal"]
SHARES: dict[Source, float] = {
    "python": 0.22,
    "c": 0.16,
    "go": 0.10,
    "english": 0.22,
    "languages": 0.15,
    "formal": 0.15,
}
"""What each source has of the training tokens."""

LARGEST_FILE_BYTES = 4 << 20
LANGUAGES = "de|fr|es|it|pt|pt[_-]br|ru|ja|zh[_-]cn|pl|nl|tr|ko|cs|uk|ro|hu|fi|el"


@dataclasses.dataclass(frozen=True)
class Pick:
    """Which files of a package are documents of which source."""

    source: Source
    pattern: str
    """Searched in the file's path inside the package, without regard to case."""
    form: Form = "plain"
    keep: float = 1.0
    """Share of the matching files that is looked at, chosen by the hash of their path: large packages need not be."""


@dataclasses.dataclass(frozen=True)
class Package:
    """One package of a registry."""

    registry: Literal["debian", "python"]
    name: str
    picks: tuple[Pick, ...]


def _debian(names: str, *picks: Pick) -> list[Package]:
    return [Package("debian", name, picks) for name in names.split()]


def _python(names: str, *picks: Pick) -> list[Package]:
    return [Package("python", name, picks) for name in names.split()]


_RST = Pick("english", r"/_sources/.*\.txt$")
_HTML = Pick("english", r"\.html?$", "html")
_OTHER_HTML = Pick("languages", r"\.html?$", "html")
_V = Pick("formal", r"\.v$")

PACKAGES: tuple[Package, ...] = (
    *_debian("libpython3.11-stdlib", Pick("python", r"\.py$")),
    *_debian("libpython3.11-testsuite", Pick("python", r"\.py$", keep=0.3)),
    *_python(
        "aiohttp astropy bokeh celery dask django docutils ipython matplotlib mypy networkx nltk pandas pydantic "
        "scikit-learn scipy scrapy sphinx sqlalchemy statsmodels sympy tornado twisted werkzeug xarray",
        Pick("python", r"\.py$", keep=0.5),
    ),
    *_debian(
        "linux-source-6.1",
        Pick(
            "c", r"/(kernel|mm|fs|lib|block|net|ipc|security|crypto|sound/core|drivers/(base|char|md|pci|usb))/.*\.c$"
        ),
        Pick("c", r"/include/linux/.*\.h$", keep=0.5),
    ),
    *_debian("glibc-source", Pick("c", r"\.[ch]$", keep=0.3)),
    *_debian("golang-1.19-src golang-google-grpc-dev golang-github-docker-docker-dev", Pick("go", r"\.go$", keep=0.7)),
    *_debian("linux-doc-6.1 python3.11-doc debian-policy developers-reference", _RST),
    *_debian("cmake-doc", _RST),
    *_debian("python-sqlalchemy-doc", Pick("english", r"/rst/.*\.rst$")),
    *_debian("git-doc", Pick("english", r"\.txt$")),
    *_debian("perl-doc", Pick("english", r"\.pod$")),
    *_debian(
        "postgresql-doc-15 python-django-doc octave-doc maxima-doc r-doc-html debian-reference-en maint-guide bash-doc",
        _HTML,
    ),
    *_debian("racket-doc", dataclasses.replace(_HTML, keep=0.3)),
    *_debian("manpages manpages-dev", Pick("english", r"/man\d/.*\.gz$", "roff")),
    *_debian("libreoffice-help-en-us", dataclasses.replace(_HTML, keep=0.5)),
    *_debian(
        "debian-handbook",
        Pick("english", r"/en-US/.*\.html$", "html"),
        Pick("languages", rf"/({LANGUAGES})-[A-Z]+/.*\.html$", "html", 0.5),
    ),
    *_debian(
        "apache2-doc",
        Pick("english", r"/manual/en/.*\.html$", "html"),
        Pick("languages", rf"/manual/({LANGUAGES})/.*\.html$", "html"),
    ),
    *_debian(
        "gnome-user-docs",
        Pick("english", r"/help/C/.*\.page$", "html"),
        Pick("languages", rf"/help/({LANGUAGES})/.*\.page$", "html", 0.4),
    ),
    *_debian("installation-guide-amd64", Pick("languages", rf"/({LANGUAGES})/install[^/]*\.txt\.gz$")),
    *_debian(
        "debian-reference-de debian-reference-fr debian-reference-es debian-reference-it debian-reference-ja "
        "debian-reference-pt debian-reference-zh-cn developers-reference-de developers-reference-fr "
        "developers-reference-ja developers-reference-ru debian-faq-ru debian-faq-zh-cn debian-faq-nl debian-faq-ko",
        _OTHER_HTML,
    ),
    *_debian(
        "libreoffice-help-de libreoffice-help-fr libreoffice-help-es libreoffice-help-ru libreoffice-help-ja "
        "libreoffice-help-zh-cn libreoffice-help-pl libreoffice-help-tr libreoffice-help-fi libreoffice-help-hu "
        "libreoffice-help-el libreoffice-help-ko libreoffice-help-pt-br",
        dataclasses.replace(_OTHER_HTML, keep=0.15),
    ),
    *_debian(
        "manpages-de manpages-fr manpages-es manpages-pl manpages-pt-br manpages-ru manpages-ja manpages-it "
        "manpages-nl manpages-ro manpages-cs manpages-zh manpages-tr manpages-uk",
        Pick("languages", r"/man\d/.*\.gz$", "roff", 0.5),
    ),
    *_debian(
        "libcoq-stdlib libcoq-mathcomp-algebra libcoq-mathcomp-ssreflect libcoq-mathcomp-fingroup "
        "libcoq-mathcomp-field libcoq-mathcomp-character libcoq-mathcomp-solvable libcoq-mathcomp-analysis libcoq-corn "
        "libcoq-math-classes libcoq-coquelicot libcoq-flocq libcoq-iris libcoq-stdpp libcoq-interval",
        _V,
    ),
    *_debian("agda-stdlib", Pick("formal", r"\.agda$")),
    *_debian("hol-light", Pick("formal", r"\.(ml|hl)$", keep=0.5)),
    *_debian("acl2-books-source", Pick("formal", r"\.lisp$", keep=0.1)),
)

# --- getting them ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Locked:
    """One package as it was used."""

    registry: str
    name: str
    version: str
    sha256: str


def fetch(directory: Path, lock: Path) -> dict[str, Path]:
    """Every package's file by name, downloaded into `directory` if it is not there; `lock` is read, or written anew.

    Raises `Refusal` for a package that the registry no longer has in its locked version, or has with other bytes.
    """
    directory.mkdir(parents=True, exist_ok=True)
    locked = {row["name"]: Locked(**row) for row in json.loads(lock.read_text())} if lock.exists() else {}
    files: dict[str, Path] = {}
    found: list[Locked] = []
    for package in PACKAGES:
        known = locked.get(package.name)
        path = _present(directory, package, known) or _download(directory, package, known)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        if known and known.sha256 != digest:
            raise Refusal(f"{path}: its SHA-256 is {digest}, but {lock} has {known.sha256} for {known.version}")
        files[package.name] = path
        found.append(Locked(package.registry, package.name, _version(path), digest))
    if not locked:
        lock.write_text(json.dumps([dataclasses.asdict(row) for row in found], indent=1) + "\n")
    return files


def _file_pattern(package: Package, version: str = "*") -> str:
    if package.registry == "debian":
        return f"{package.name}_{version.replace(':', '%3a')}_*.deb"
    return f"{package.name.replace('-', '_')}-{version}-*.whl"


def _version(path: Path) -> str:
    separator = "_" if path.suffix == ".deb" else "-"
    return path.name.split(separator)[1].replace("%3a", ":")


def _present(directory: Path, package: Package, known: Locked | None) -> Path | None:
    paths = sorted(directory.glob(_file_pattern(package, known.version if known else "*")))
    return paths[-1] if paths else None


def _download(directory: Path, package: Package, known: Locked | None) -> Path:
    if package.registry == "debian":
        wanted = f"{package.name}={known.version}" if known else package.name
        command = ["apt-get", "-q", "download", wanted]
    else:
        wanted = f"{package.name}=={known.version}" if known else package.name
        platforms = [f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 24, 17, 5)] + ["manylinux2014_x86_64"]
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", wanted]
        command += ["--python-version", "3.12", "--implementation", "cp"]
        command += [argument for platform in platforms for argument in ("--platform", platform)]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True)
    path = _present(directory, package, known)
    if done.returncode or path is None:
        said = (done.stderr or done.stdout).strip().splitlines() or ["nothing"]
        raise Refusal(f"{wanted} cannot be downloaded with {command[0]}: {said[-1]}")
    return path


# --- reading them ------------------------------------------------------------------------------------------------


def documents(package: Package, path: Path) -> Iterator[tuple[Pick, str, bytes]]:
    """(pick, path inside the package, bytes) of every file that is picked, in the package's own order."""
    for name, file in _members(path):
        for pick in package.picks:
            if re.search(pick.pattern, name, re.IGNORECASE):
                if share_of(f"{package.name}:{name}") < pick.keep:
                    data = file.read()
                    yield pick, name, gzip.decompress(data) if name.endswith(".gz") else data
                break


def share_of(text: str) -> float:
    """A number in [0, 1) from a text's hash, the same everywhere."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") / 2**64


def _members(path: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """Files of a wheel or of a Debian package, and those of the tar files that hold sources in it."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                if 0 < entry.file_size <= LARGEST_FILE_BYTES:
                    with archive.open(entry) as file:
                        yield entry.filename, file
        return
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", path], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        with tarfile.open(fileobj=process.stdout, mode="r|") as archive_of_package:
            yield from _tar_members(archive_of_package)


def _tar_members(archive: tarfile.TarFile) -> Iterator[tuple[str, IO[bytes]]]:
    for entry in archive:
        if not entry.isfile() or entry.size == 0:
            continue
        file = archive.extractfile(entry)
        assert file is not None
        if "/usr/src/" in entry.name and entry.name.endswith((".tar.xz", ".tar.gz")):
            with tarfile.open(fileobj=file, mode="r|*") as inner:
                yield from _tar_members(inner)
        elif entry.size <= LARGEST_FILE_BYTES:
            yield entry.name, file
