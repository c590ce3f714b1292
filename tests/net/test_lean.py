"""The DHT without the rest of hivemind, in processes of their own, because imports cannot be undone."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = "sorted({'torch', 'transformers', 'numpy', 'hivemind.averaging', 'hivemind.moe'} & set(sys.modules))"


def run(code: str) -> str:
    """Return what a fresh interpreter prints, in which a warning is an error; anything on stderr fails."""
    # hivemind itself, imported whole, uses what torch and Python 3.11 have deprecated
    options = ["-W", "error", "-W", "ignore::DeprecationWarning", "-W", "ignore::FutureWarning"]
    done = subprocess.run([sys.executable, *options, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_a_bootstrap_node_needs_no_torch() -> None:
    code = f"import sys; from peer.net import dht, node, lean; lean.load(); print({HEAVY})"
    assert run(code) == "[]\n"


def test_a_whole_network_needs_no_torch() -> None:
    assert run(f"import sys; import peer.net.internet, peer.net.memory; print({HEAVY})") == "[]\n"


def test_a_node_comes_up_and_goes_down_without_torch_and_without_a_word() -> None:
    code = f"""
import asyncio, sys, tempfile, pathlib
from peer.net.dht import Dht

async def main():
    with tempfile.TemporaryDirectory() as home:
        dht = Dht(pathlib.Path(home))
        await dht.start()
        print(len(dht.multiaddrs) > 0)
        await dht.close()

asyncio.run(main())
print({HEAVY})
"""
    assert run(code) == "True\n[]\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "first", ["load(); from hivemind.dht import DHTNode", "from hivemind.dht import DHTNode; load()"]
)
def test_the_rest_of_hivemind_can_still_be_imported_before_or_after(first: str) -> None:
    code = f"""
from peer.net.lean import load
{first}
import hivemind
from hivemind.averaging import DecentralizedAverager
from hivemind.p2p import P2P
node, control = load()
print(node.DHTNode is DHTNode is hivemind.dht.DHTNode, P2P is node.P2P, hivemind.__version__ != "")
"""
    assert run(code) == "True True True\n"
