"""What this machine is: processor, instruction sets, cores, memory, GPUs, library versions."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from hasten.core import driver
from hasten.core.cgroup import cpu_quota, memory_left_bytes

# Only what decides which variant can run or wins. The kernel's names on the left, ours on the right.
_INSTRUCTIONS = {
    "avx2": "avx2",
    "avx512f": "avx512",
    "avx_vnni": "avx_vnni",
    "avx512_vnni": "avx512_vnni",
    "avx512_bf16": "avx512_bf16",
    "avx512_fp16": "avx512_fp16",
    "amx_bf16": "amx_bf16",
    "amx_fp16": "amx_fp16",
    "amx_int8": "amx_int8",
    "asimd": "neon",
    "asimddp": "dotprod",
    "asimdhp": "fp16",
    "i8mm": "i8mm",
    "bf16": "bf16",
    "sve": "sve",
}

_LIBRARIES = (
    "hasten", "numpy", "onnx", "onnxruntime", "onnxruntime-gpu", "openvino", "tokenizers", "torch", "transformers"
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    memory_bytes: int
    capability: str
    driver: str


@dataclass(frozen=True, slots=True)
class Machine:
    system: str
    architecture: str
    cpu: str
    instructions: tuple[str, ...]
    cores: int
    memory_bytes: int
    gpus: tuple[Gpu, ...]
    python: str
    libraries: dict[str, str]

    def has(self, *instructions: str) -> bool:
        """Whether the processor has any of these."""
        return any(name in self.instructions for name in instructions)

    def __str__(self) -> str:
        gpus = f", {len(self.gpus)}× {self.gpus[0].name}" if self.gpus else ""
        memory = self.memory_bytes / 2**30
        return f"{self.cpu} ({self.architecture}), {self.cores} cores, {memory:.0f} GiB{gpus}"


@cache
def this_machine() -> Machine:
    model, flags = _cpu()
    return Machine(
        system=f"{platform.system()} {platform.release()}",
        architecture=platform.machine(),
        cpu=model,
        instructions=tuple(ours for theirs, ours in _INSTRUCTIONS.items() if theirs in flags),
        cores=usable_cores(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        gpus=tuple(Gpu(**found) for found in driver.visible()),
        python=platform.python_version(),
        libraries=library_versions(),
    )


def usable_cores() -> int:
    """Cores this process may use: its affinity, and its quota where it has one."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota()
    return count if quota is None else min(count, max(1, int(quota)))


def peak_memory_bytes() -> int:
    """The most memory this process has held so far."""
    status = Path("/proc/self/status")
    if status.exists():
        match = re.search(r"^VmHWM:\s+(\d+) kB", status.read_text(), re.MULTILINE)
        if match:
            return int(match[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def gpu_memory_used_bytes() -> int:
    """By everyone, on all GPUs."""
    used = _output("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits")
    return sum(int(line) for line in used.splitlines() if line.strip().isdigit()) * 2**20


def available_memory_bytes() -> int | None:
    """How much memory processes can still be given, by the system and by the limits of this one; None where unknown."""
    meminfo = Path("/proc/meminfo")
    match = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text(), re.MULTILINE) if meminfo.exists() else None
    known = [int(match[1]) * 1024 if match else None, memory_left_bytes()]
    return min((size for size in known if size is not None), default=None)


def busy_cpu_seconds() -> float | None:
    """Processor time all processes together have used, the hypervisor's theft included; None where nobody counts."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return None
    user, nice, system, _idle, _wait, irq, softirq, steal, *_ = map(int, stat.read_text().split("\n", 1)[0].split()[1:])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def library_versions() -> dict[str, str]:
    found = {}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _cpu() -> tuple[str, frozenset[str]]:
    if sys.platform == "darwin":
        name = _output("sysctl", "-n", "machdep.cpu.brand_string")
        flags = frozenset({"asimd", "asimddp", "asimdhp"}) if platform.machine() == "arm64" else frozenset()
        return name or platform.processor() or "unknown", flags
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or "unknown", frozenset()
    model = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", text, re.MULTILINE)
    flags_line = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    name = model[1].strip() if model else _arm_name(text)
    return name, frozenset(flags_line[1].split() if flags_line else ())


# Arm processors give numbers, not names; these are the servers people rent.
_ARM_PARTS = {
    "0xd0c": "Neoverse-N1",
    "0xd40": "Neoverse-V1",
    "0xd49": "Neoverse-N2",
    "0xd4f": "Neoverse-V2",
    "0xd84": "Neoverse-V3",
    "0xd8e": "Neoverse-N3",
}


def _arm_name(cpuinfo: str) -> str:
    part = re.search(r"^CPU part\s*:\s*(\S+)$", cpuinfo, re.MULTILINE)
    return _ARM_PARTS.get(part[1], f"Arm part {part[1]}") if part else "unknown"


def _output(*command: str) -> str:
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout.strip()
