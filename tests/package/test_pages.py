"""The site that Sphinx made in NSA_SITE: it documents every public name of the package, and no other."""

import importlib
import os
import pkgutil
import re
from pathlib import Path
from types import ModuleType

import pytest
from sphinx.util.inventory import InventoryFile

import nsa

SITE = Path(os.environ["NSA_SITE"])
MEMBERS = {"attribute", "method", "property"}  # of classes


def public_modules():
    """Those that say what is public in them."""
    names = ["nsa", *(found.name for found in pkgutil.walk_packages(nsa.__path__, "nsa."))]
    modules = (importlib.import_module(name) for name in names if not name.rpartition(".")[2].startswith("_"))
    return {module.__name__: module for module in modules if hasattr(module, "__all__")}


@pytest.fixture(scope="module")
def places():
    """Full name -> kind, page and anchor. A class that is defined elsewhere is there under that name, too: left out."""
    inventory = InventoryFile.loads((SITE / "objects.inv").read_bytes(), uri="").data
    found = {}
    for kind, items in inventory.items():
        for name, item in items.items():
            page, _, anchor = item.uri.partition("#")
            if kind.startswith("py:") and anchor in (name, f"module-{name}"):
                found[name] = (kind.removeprefix("py:"), page, anchor)
    return found


def test_public_names_and_no_others_have_a_place(places):
    modules = public_modules()
    known = {"nsa", "nsa.compat.fla", "nsa.hf", "nsa.parallel", "nsa.reference", "nsa.replay", "nsa.serving"}
    assert known <= modules.keys()
    public = set(modules)
    for name, module in modules.items():
        public |= {f"{name}.{own}" for own in module.__all__ if not isinstance(getattr(module, own), ModuleType)}
    found = {name for name, (kind, _, _) in places.items() if kind not in MEMBERS}
    assert not public - found, "without a place in docs/api"
    assert not found - public, "in docs/api, but in no __all__"


def test_a_place_is_on_the_page_of_its_module(places):
    text = {page: (SITE / page).read_text(encoding="utf-8") for _, page, _ in places.values()}
    for name, (_, page, anchor) in places.items():
        assert name == Path(page).stem or name.startswith(f"{Path(page).stem}."), page
        assert f'id="{anchor}"' in text[page], f"{name} is not in {page}"


def test_the_functions_of_the_headers_have_a_place():
    headers = sorted((Path(__file__).parents[2] / "include" / "nsa").glob("*.h"))
    declared = {name for header in headers for name in re.findall(r"^Status (\w+)\(", header.read_text(), re.MULTILINE)}
    inventory = InventoryFile.loads((SITE / "objects.inv").read_bytes(), uri="").data
    functions = {name.partition("(")[0].removeprefix("nsa::") for name in inventory["cpp:function"]}
    assert len(declared) > 20 and declared <= functions, declared - functions
