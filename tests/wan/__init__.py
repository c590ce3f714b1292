"""A WAN on one machine: real processes in network namespaces, joined by emulated access lines. See README.md here."""

from tests.wan.lines import Line as Line
from tests.wan.lines import Lines as Lines
from tests.wan.relay import Traffic as Traffic
from tests.wan.wan import Wan as Wan
