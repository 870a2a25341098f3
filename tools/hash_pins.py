"""Write the hashes of the files of pins in launch/ anew: `python tools/hash_pins.py`.

For each pin, the SHA-256 of every file of the package index that pip may choose: the wheels for
Linux x86-64 and any of the supported Pythons, and the source. The comment above a pin has the kind
of each file, in the order of the hashes: the Python and ABI of a wheel, or `source`. torch has no
hash: its CPU build comes from different indexes as different files.
"""

import functools
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urldefrag
from urllib.request import urlopen

from packaging.markers import Marker
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import canonicalize_name, parse_sdist_filename, parse_wheel_filename
from packaging.version import Version
from pip._internal.models.index import PyPI  # pip's default, by its own name

LAUNCH = Path(__file__).parent.parent / "launch"
PINS = (LAUNCH / "requirements-cpu.txt", LAUNCH / "requirements-adapters.txt")
PYTHONS = ((3, 11), (3, 12), (3, 13))
INDEX = os.environ.get("PIP_INDEX_URL", PyPI.simple_url)
# Of Debian 12's and Ubuntu 22.04's C library and older ones.
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(35, 4, -1)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"]


class Pin(NamedTuple):
    name: str
    version: str
    marker: str  # "": every Python

    def __str__(self) -> str:
        return f"{self.name}=={self.version}" + (f" ; {self.marker}" if self.marker else "")

    def pythons(self) -> list[tuple[int, int]]:
        if not self.marker:
            return list(PYTHONS)
        marker = Marker(self.marker)
        return [p for p in PYTHONS if marker.evaluate({"python_version": f"{p[0]}.{p[1]}"})]


def read_pins(text: str) -> tuple[str, list[Pin]]:
    """The comment at the top, which an empty line ends, and the pins."""
    header = text.partition("\n\n")[0] + "\n\n"
    found = re.findall(r"^([\w.-]+)==([\w.+!]+)(?: *; *([^\\\n]+?))? *\\?$", text, re.MULTILINE)
    return header, [Pin(*parts) for parts in found]


@functools.cache
def tags(python: tuple[int, int]) -> set[Tag]:
    interpreter = f"cp{python[0]}{python[1]}"
    return {
        *cpython_tags(python, platforms=PLATFORMS),
        *compatible_tags(python, interpreter, PLATFORMS),
    }


def kind(file: str, pin: Pin) -> str | None:
    """`cp311-cp311`, `py3-none`, `source`; None: pip does not choose this file for the pin."""
    try:
        if not file.endswith(".whl"):
            return "source" if parse_sdist_filename(file)[1] == Version(pin.version) else None
        _, version, _, wheel_tags = parse_wheel_filename(file)
    except ValueError:  # files of other kinds, and names older than the naming rules
        return None
    if version != Version(pin.version):
        return None
    if not any(wheel_tags & tags(python) for python in pin.pythons()):
        return None
    return "-".join(file.removesuffix(".whl").split("-")[-3:-1])


class _Links(HTMLParser):
    def __init__(self):
        super().__init__()
        self.hrefs: list[str] = []

    def handle_starttag(self, tag, attrs):
        if tag == "a":
            self.hrefs.append(dict(attrs)["href"])


def files(pin: Pin) -> list[tuple[str, str]]:
    """Kind and SHA-256 of each file that pip may choose."""
    page = _Links()
    with urlopen(f"{INDEX}/{canonicalize_name(pin.name)}/", timeout=60) as answer:
        page.feed(answer.read().decode())
    found = set()
    for href in page.hrefs:
        url, fragment = urldefrag(href)
        of_file = kind(unquote(url.rpartition("/")[2]), pin)
        if of_file is not None:
            found.add((of_file, fragment.removeprefix("sha256=")))
    return sorted(found)


def entry(pin: Pin) -> str:
    if pin.name == "torch":
        return f"{pin}\n"
    found = files(pin)
    if not found:
        sys.exit(f"{pin}: the index has no file for it")
    kinds = ", ".join(of_file for of_file, _ in found)
    lines = [str(pin), *(f"--hash=sha256:{value}" for _, value in found)]
    return f"# {kinds}\n" + " \\\n    ".join(lines) + "\n"


def main() -> None:
    for path in PINS:
        header, pins = read_pins(path.read_text())
        with ThreadPoolExecutor(4) as pool:
            entries = list(pool.map(entry, pins))
        path.write_text(header + "".join(entries))


if __name__ == "__main__":
    main()
