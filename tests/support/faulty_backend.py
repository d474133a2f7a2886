"""A backend that stalls or fails on demand, installed as another package's backend would be."""

from __future__ import annotations

import os
from pathlib import Path

from hasten.bundle import Bundle

# The backend looks for files in FAULTY_FOLDER: with "wait" it does not open, with "hang" it does not return from a run
# (and creates "hangs"), with "fail" a run raises an error, and with a number in "fail" only a run of rows that long.
# With a number in "die" a run of rows that long ends the process. Threads whose names contain the text in "kill" end;
# the method that "break" names (module, class, method) raises.
_BACKEND = """
import ctypes, os, signal, threading, time
from importlib import import_module
from pathlib import Path
from hasten.backends import PaddedSession
from hasten.backends.graph import Graph

FOLDER = Path(os.environ["FAULTY_FOLDER"])

class Session(PaddedSession):
    def __init__(self, inner):
        self.spec, self._inner = inner.spec, inner

    def run(self, batch):
        while (FOLDER / "hang").exists():
            (FOLDER / "hangs").touch()
            time.sleep(0.01)
        if (FOLDER / "die").exists() and int((FOLDER / "die").read_text()) in batch.lengths:
            os.kill(os.getpid(), signal.SIGKILL)
        if (FOLDER / "fail").exists():
            tokens = (FOLDER / "fail").read_text()
            if not tokens or int(tokens) in batch.lengths:
                raise RuntimeError("out of luck")
        return self._inner.run(batch)

def inject():
    while True:
        if (FOLDER / "kill").exists():
            name = (FOLDER / "kill").read_text()
            for thread in threading.enumerate():
                if name in thread.name:
                    # Takes effect when the thread wakes up.
                    raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
                    raise_in(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
            (FOLDER / "kill").unlink()
        if (FOLDER / "break").exists():
            module, owner, method = (FOLDER / "break").read_text().split()
            def fail(*_):
                raise RuntimeError("out of order")
            setattr(getattr(import_module(module), owner), method, fail)
            (FOLDER / "break").unlink()
        time.sleep(0.01)

class Faulty(Graph):
    name = "faulty"

    def open(self, artifact, options):
        while (FOLDER / "wait").exists():
            time.sleep(0.01)
        threading.Thread(target=inject, daemon=True).start()
        return Session(super().open(artifact, options))

BACKEND = Faulty()
"""


def install_faulty_backend(site: Path) -> None:
    """Install the backend as a distribution with an entry point, as pip does."""
    info = site / "faulty-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[hasten.backends]\nfaulty = hasten_test_faulty:BACKEND\n")
    (site / "hasten_test_faulty.py").write_text(_BACKEND)


def faulty_environment(bundle: Bundle, folder: Path) -> dict[str, str]:
    """Return the environment of a server that finds the backend and watches for files in the folder."""
    path = os.pathsep.join([str(bundle.path.parent / "site"), os.environ.get("PYTHONPATH", "")])
    return {"FAULTY_FOLDER": str(folder), "PYTHONPATH": path}
