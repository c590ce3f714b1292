"""peer bootstrap: a DHT node alone, by which peers find one another."""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress
from typing import Any

import click

from peer.config import BOOTSTRAP_HOME, BOOTSTRAP_PORT, MODEL, Config
from peer.home import Home
from peer.net.addresses import is_loopback, parse_announce, parse_multiaddr

from .help import Command, examples, option


@click.command(
    name="bootstrap",
    cls=Command,
    short_help="Run a node by which peers find one another.",
    epilog=examples(
        "peer bootstrap",
        "peer bootstrap --announce peer.example.org:7700",
        "peer bootstrap --bootstrap /ip4/203.0.113.5/tcp/7700/p2p/12D3KooW...",
    ),
)
@option(
    "--port",
    type=int,
    metavar="N",
    help=f"The TCP port on which peers call; 0 takes any free one.  [default: {BOOTSTRAP_PORT}]",
)
@option(
    "--announce",
    metavar="HOST[:PORT]",
    help="Where peers are to call, if that isn't what this machine sees: a router's outer address, or a name.",
)
@option(
    "--bootstrap",
    multiple=True,
    metavar="MULTIADDR",
    help="Another such node, to form one network with; may be given several times.",
)
@option(
    "--home",
    metavar="FOLDER",
    help=f"Where the node's key is kept, so that its address stays the same.  [default: {BOOTSTRAP_HOME}]",
)
def command(**flags: Any) -> None:
    """Run a node that trains nothing and helps peers find one another, until Ctrl-C.

    It needs no GPU and little memory, but an address and a port that others can call. It prints the command with which
    they join; one node serves any number of runs.
    """
    config = Config.load(flags, {"home": BOOTSTRAP_HOME, "port": BOOTSTRAP_PORT})
    asyncio.run(_until_signal(config))


async def _until_signal(config: Config) -> None:
    """Serve until SIGINT or SIGTERM; a second one ends the process at once."""
    loop = asyncio.get_running_loop()
    serving = loop.create_task(_serve(config))
    signals = (signal.SIGINT, signal.SIGTERM)

    def stop() -> None:
        for number in signals:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)
        serving.cancel()

    for number in signals:
        loop.add_signal_handler(number, stop)
    with suppress(asyncio.CancelledError):
        await serving


async def _serve(config: Config) -> None:
    from peer.net.dht import Dht

    home = Home(config.home)
    announce = parse_announce(config.announce) if config.announce else None
    with home.lock("", ""):
        dht = Dht(home.path, config.bootstraps, config.port, announce)
        try:
            await dht.start()
            click.echo(_greeting(dht.multiaddrs, dht.lonely))
            await asyncio.Event().wait()
        finally:
            await dht.close()


def _greeting(multiaddrs: tuple[str, ...], lonely: bool) -> str:
    near = [address for address in multiaddrs if is_loopback(parse_multiaddr(address).host)]
    best, *others = [*(address for address in multiaddrs if address not in near), *near]
    lines = ["Peers join with:", f"  peer join --model {MODEL} --bootstrap {best}"]
    if others:
        lines += ["This node's other addresses:", *(f"  {address}" for address in others)]
    if best in near:
        lines += ["Only this machine can call these; say where others can with --announce HOST."]
    if lonely:
        lines += ["No other bootstrap answers; this node keeps trying."]
    return "\n".join(lines)
