"""Try any program on emulated lines: `python -m tests.wan LINES.toml --on 0 "iperf3 -s" --on 1 "iperf3 -c {0}"`."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from peer.errors import ConfigError
from tests.wan import Lines, Wan

_HOST = re.compile(r"\{(\d+)\}")


def main() -> int:
    """Start the commands in their order, and end with the last one; return its status."""
    parser = argparse.ArgumentParser(prog="python -m tests.wan", description=(__doc__ or "").partition(":")[0])
    parser.add_argument("lines", type=Path, help="TOML file of the hosts' lines")
    parser.add_argument(
        "--on",
        action="append",
        nargs=2,
        required=True,
        metavar=("HOST", "COMMAND"),
        help="run a shell command on the host of this number, from 0; {0} in it is the address of host 0. Repeatable; "
        "when the last one ends, all others are ended",
    )
    options = parser.parse_args()
    try:
        lines = Lines.load(options.lines)
        known = {str(host): host for host in range(len(lines.hosts))}
        for host in [host for host, _ in options.on] + [host for _, text in options.on for host in _HOST.findall(text)]:
            if host not in known:
                raise ConfigError(f"there is no host {host}; the file describes hosts 0 to {len(known) - 1}")
        with Wan(lines) as wan:
            for host, text in options.on:
                command = _HOST.sub(lambda match: wan.address(int(match[1])), text)
                process = wan.popen(known[host], ["sh", "-c", command])
            return process.wait()
    except ConfigError as error:
        print(f"python -m tests.wan: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
