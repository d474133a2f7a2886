"""List the modules that code imports, in a fresh process."""

from __future__ import annotations

import json
import subprocess
import sys


def modules_after(code: str, *arguments: str) -> set[str]:
    """Return the top-level modules that code imports beyond those of a bare interpreter."""
    program = f"import json, sys\nbefore = set(sys.modules)\n{code}\nprint(json.dumps([*set(sys.modules) - before]))"
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True)
    return {name.split(".")[0] for name in json.loads(done.stdout.splitlines()[-1])}
