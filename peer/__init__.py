"""peerloom: people who don't know each other train one language model together over ordinary internet links."""

__version__ = "0.1.0"
