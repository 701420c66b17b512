"""THIRD_PARTY.md lists the packages of an installation, with the licences that their metadata state."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, files, metadata, requires

import pytest
from packaging.requirements import Requirement

from tests import markdown

_PAGE = "THIRD_PARTY.md"
_US = "mlserver-torch-stream"
# Words of the licences that whoever installs these packages may combine with Apache-2.0. MPL's parts stay files of
# their own.
_ALLOWED = re.compile(r"Apache|MIT|BSD|0BSD|ISC|PSF|Python Software|Zlib|ZPL|CC0|CNRI|BSL|Mozilla|MPL|LLVM-exception")
_REFUSED = re.compile(r"GPL|AGPL|SSPL|Commercial|Proprietary|NonCommercial")
# Packages whose metadata states none: by the file of their licence, which holds this line.
_BY_FILE = {"py-grpc-prometheus": ("Apache-2.0", "Apache License")}


def installed() -> dict[str, Requirement]:
    """Returns the installed requirements of the package, and their requirements."""
    found: dict[str, Requirement] = {}
    left = [Requirement(_US)]
    while left:
        wanted = left.pop()
        try:
            lines = requires(wanted.name) or []
        except PackageNotFoundError:
            continue  # for another platform, or an extra of a dependency
        if wanted.name != _US:
            found.setdefault(_normal(wanted.name), wanted)
        for line in lines:
            each = Requirement(line)
            extras = wanted.extras or {""}
            applies = each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in extras)
            if applies and _normal(each.name) not in found:
                left.append(each)
    return found


def licence(name: str) -> str:
    """Returns the licence expression, or else the classifiers, or else the older field.

    Empty if the metadata states none.
    """
    if name in _BY_FILE:
        return _BY_FILE[name][0]
    fields = metadata(name)
    classified = [each.split(" :: ")[-1] for each in fields.get_all("Classifier") or () if each.startswith("License")]
    return fields.get("License-Expression") or ", ".join(classified) or (fields.get("License") or "").splitlines()[0]


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.lower())


def _listed() -> dict[str, str]:
    return {name: stated for name, stated in markdown.table(_PAGE, "Packages")}


def test_each_package_is_listed_with_the_licence_that_it_states() -> None:
    stated = {name: licence(name) for name in installed()}
    listed = _listed()
    assert {name: listed.get(name) for name in stated} == stated


def test_every_licence_is_one_that_may_be_combined_with_ours() -> None:
    refused = {name: stated for name, stated in _listed().items() if _REFUSED.search(stated)}
    unknown = {name: stated for name, stated in _listed().items() if not _ALLOWED.search(stated)}
    assert refused == unknown == {}


def test_nothing_is_listed_that_the_lock_does_not_have() -> None:
    locked = {_normal(name) for name in re.findall(r"^([\w.-]+)==", markdown.read("constraints.txt"), re.MULTILINE)}
    assert set(_listed()) - locked - {"setuptools"} == set()  # `make lock` leaves setuptools to pip


@pytest.mark.parametrize("name", _BY_FILE)
def test_a_licence_that_no_metadata_states_is_that_of_its_file(name: str) -> None:
    fields = metadata(name)
    assert not fields.get("License-Expression") and not fields.get("License")
    (file,) = (path for path in files(name) or () if path.name == "LICENSE")
    assert _BY_FILE[name][1] in file.read_text(encoding="utf-8")
