"""HOME: the folder in which a daemon keeps all that it owns, and the lock that keeps a second daemon out of it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from peer.errors import ConfigError

PATIENCE_S = 1.0
"""How long `lock` tries against one that holds the lock and is no daemon: a `holder` looks, and is gone at once."""


@dataclass(frozen=True)
class Holder:
    """The daemon that holds a home's lock, or held it last.

    started is Unix time; live says whether it holds the lock now.
    """

    pid: int
    started: float
    run_id: str
    peer_id: str
    live: bool


class Home:
    """Where things lie in one home folder. Naming a home touches nothing; `create` and `lock` do."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        self.identity_key = self.path / "identity.key"
        self.dht_key = self.path / "dht.key"
        self.checkpoints = self.path / "checkpoints"
        self.events = self.path / "events.jsonl"
        self.config = self.path / "config.toml"
        self.manifest = self.path / "run.toml"
        self.cache = self.path / "cache"
        self.lock_file = self.path / "lock"
        self.traffic = self.path / "traffic.json"
        self.pause_file = self.path / "paused"

    def create(self) -> None:
        """Make the folder, for its owner's eyes only, unless it is there; raises `ConfigError` if it is of no use."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.mkdir(mode=0o700, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path):
                pass
        except (FileExistsError, NotADirectoryError) as error:
            raise ConfigError(
                f"home '{self.path}' cannot be used, because it is or lies under something that is not a folder; "
                "give another with --home"
            ) from error
        except OSError as error:
            raise self._unusable(error) from error

    @contextmanager
    def lock(self, run_id: str, peer_id: str) -> Iterator[None]:
        """Hold the home for this process; raises `ConfigError` while a live daemon holds it.

        The kernel lets go of the lock when the process ends, however it ends.
        """
        self.create()
        try:
            file = os.open(self.lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise self._unusable(error) from error
        try:
            self._seize(file)
            try:
                words = {"pid": os.getpid(), "started": time.time(), "run_id": run_id, "peer_id": peer_id}
                os.ftruncate(file, 0)
                os.pwrite(file, json.dumps(words).encode() + b"\n", 0)
            except OSError as error:
                raise self._unusable(error) from error
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # closing alone would leave it to a forked child that lives on
            os.close(file)

    def holder(self) -> Holder | None:
        """Return who holds the lock or held it last, None if nobody ever did; never gets in a daemon's way."""
        try:
            file = os.open(self.lock_file, os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise self._unusable(error) from error
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                live = False
            except BlockingIOError:
                live = True
            return _decode(os.pread(file, 65536, 0), live)
        finally:
            os.close(file)

    @property
    def paused_s(self) -> float | None:
        """Since when the peer is to wait, in Unix time; None if it is not, or if nobody can tell."""
        try:
            return os.stat(self.pause_file).st_mtime
        except OSError:
            return None

    def pause(self) -> bool:
        """Have the peer wait, now or when it is started; False if it was to wait already. Raises `ConfigError`."""
        try:
            os.close(os.open(self.pause_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        except FileExistsError:
            return False
        except OSError as error:
            raise self._unusable(error) from error
        return True

    def resume(self) -> bool:
        """Have the peer go on; False if it was not to wait. Raises `ConfigError`."""
        try:
            os.unlink(self.pause_file)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise self._unusable(error) from error
        return True

    def _seize(self, file: int) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                holder = _decode(os.pread(file, 65536, 0), live=True)
                if (holder is not None and _runs(holder.pid)) or time.monotonic() > deadline:
                    raise self._in_use(holder) from None
            time.sleep(0.01)

    def _in_use(self, holder: Holder | None) -> ConfigError:
        who = f"the daemon with process id {holder.pid}" if holder is not None else "another daemon"
        return ConfigError(
            f"home '{self.path}' is in use by {who}; stop that one first (Ctrl-C, or kill with its process id), "
            "or give this one a folder of its own with --home"
        )

    def _unusable(self, error: OSError) -> ConfigError:
        why = "the disk is full" if error.errno == errno.ENOSPC else error.strerror
        return ConfigError(f"home '{self.path}' cannot be used ({why}); make it writable, or give another with --home")


def _decode(text: bytes, live: bool) -> Holder | None:
    """Read the lock's content; None while there is none yet."""
    try:
        words = json.loads(text)
        return Holder(
            pid=int(words["pid"]),
            started=float(words["started"]),
            run_id=str(words["run_id"]),
            peer_id=str(words["peer_id"]),
            live=live,
        )
    except (ValueError, KeyError, TypeError):
        return None


def _runs(pid: int) -> bool:
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True
