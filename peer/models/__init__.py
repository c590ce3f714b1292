"""Models and tokenizers: presets, and what transformers and tokenizers can read."""
