"""One torch thread: tests run beside each other's processes on few cores, where more threads only get in the way."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
