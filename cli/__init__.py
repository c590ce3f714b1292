"""The command line: parse, call, print. One command a file; installed as `peer.cli`."""
