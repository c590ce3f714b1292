"""Import the DHT out of hivemind, and only that.

`import hivemind.dht.node` first executes hivemind/__init__.py, which imports averaging, mixture of experts and with
them torch: 2.4 s and 200 MB that a bootstrap node has no use for. None of it is needed by the DHT itself. So the three
packages on the way are stood in for by bare ones, which find submodules in the same folders and names in hivemind's
light submodules; 0.1 s, no torch. Once the DHT is imported the stand-ins are taken away, and whoever imports hivemind
afterwards gets the real packages around the very same submodules.

If hivemind was imported before, or another version of it is laid out differently, the ordinary import is used.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_WANTED = ("hivemind.dht.node", "hivemind.p2p.p2p_daemon_bindings.control")
_BARE = ("hivemind", "hivemind.dht", "hivemind.utils")
_LIGHT = tuple(f"hivemind.utils.{name}" for name in ("logging", "serializer", "timed_storage", "asyncio"))


def load() -> tuple[Any, Any]:
    """Return hivemind's modules of the DHT node and of the control of p2pd; raises ImportError without hivemind."""
    before = set(sys.modules)
    try:
        with _stand_ins():
            node, control = map(importlib.import_module, _WANTED)
    except (ImportError, AttributeError):
        for name in set(sys.modules) - before:
            if name.partition(".")[0] == "hivemind":
                del sys.modules[name]
        node, control = map(importlib.import_module, _WANTED)
    # Its loggers write to stderr, mostly about peers that went away, which is ordinary here.
    logging.getLogger("hivemind").setLevel(logging.CRITICAL)
    return node, control


@contextmanager
def _stand_ins() -> Iterator[None]:
    """Put bare packages in place, unless hivemind is imported already, and take them away afterwards."""
    spec = importlib.util.find_spec("hivemind") if "hivemind" not in sys.modules else None
    placed: dict[str, types.ModuleType] = {}
    if spec is not None and spec.submodule_search_locations:
        folder = Path(spec.submodule_search_locations[0])
        for name in _BARE:
            placed[name] = sys.modules[name] = _bare(name, folder.joinpath(*name.split(".")[1:]))
    try:
        yield
    finally:
        for name in placed:
            del sys.modules[name]


def _bare(name: str, folder: Path) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__path__ = [str(folder)]

    def look_up(attribute: str) -> Any:
        if name == "hivemind.utils" and not attribute.startswith("__"):
            for light in map(importlib.import_module, _LIGHT):
                if hasattr(light, attribute):
                    return getattr(light, attribute)
        raise AttributeError(f"module {name!r} has no attribute {attribute!r}")

    module.__dict__["__getattr__"] = look_up
    return module
