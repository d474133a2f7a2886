"""Describe this machine: CPU, instruction sets, cores, memory, GPUs, library versions."""

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

from hasten.core.system import cuda_devices
from hasten.core.system.cgroup import cpu_quota, memory_left_bytes

# Only those that decide which variant can run or is fastest. The kernel's names on the left, ours on the right.
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
    """A GPU that CUDA lists."""

    name: str
    memory_bytes: int
    capability: str
    driver: str


GPU_FAILURE_HINT = "nvidia-smi should list the GPUs: check the driver's log (dmesg), then reload it or restart"


@dataclass(frozen=True, slots=True)
class Machine:
    """The hardware and the library versions that results depend on."""

    system: str
    architecture: str
    cpu: str
    instructions: tuple[str, ...]
    cores: int
    memory_bytes: int
    gpus: tuple[Gpu, ...]
    python: str
    libraries: dict[str, str]
    # Why the CUDA driver cannot be used; empty if it works or there is no driver or GPU.
    gpu_failure: str = ""

    def has(self, *instructions: str) -> bool:
        """Return whether the CPU has any of these instruction sets."""
        return any(name in self.instructions for name in instructions)

    def __str__(self) -> str:
        gpus = f", {len(self.gpus)}× {self.gpus[0].name}" if self.gpus else ""
        memory = self.memory_bytes / 2**30
        return f"{self.cpu} ({self.architecture}), {self.cores} cores, {memory:.0f} GiB{gpus}"


@cache
def this_machine() -> Machine:
    """Return the description of this machine, computed once."""
    model, flags = _cpu()
    gpus, gpu_failure = cuda_devices.visible()
    return Machine(
        system=f"{platform.system()} {platform.release()}",
        architecture=platform.machine(),
        cpu=model,
        instructions=tuple(ours for theirs, ours in _INSTRUCTIONS.items() if theirs in flags),
        cores=usable_cores(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        gpus=tuple(Gpu(**gpu) for gpu in gpus),
        python=platform.python_version(),
        libraries=library_versions(),
        gpu_failure=gpu_failure,
    )


def usable_cores() -> int:
    """Return the number of cores that this process may use, by its affinity and its cgroup quota."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota()
    return count if quota is None else min(count, max(1, int(quota)))


def peak_memory_bytes() -> int:
    """Return the peak resident memory of this process so far."""
    if (peak_bytes := _proc_bytes("self/status", "VmHWM")) is not None:
        return peak_bytes
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def resident_memory_bytes() -> int | None:
    """Return the resident memory of this process; None on systems other than Linux."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None


def gpu_memory_used_bytes() -> int:
    """Return the memory that all processes use on all GPUs."""
    used = _output("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits")
    return sum(int(line) for line in used.splitlines() if line.strip().isdigit()) * 2**20


def available_memory_bytes() -> int | None:
    """Return the memory that this process can still allocate, by the system and by its cgroup; None if unknown."""
    known = (_proc_bytes("meminfo", "MemAvailable"), memory_left_bytes())
    return min((size for size in known if size is not None), default=None)


def _proc_bytes(name: str, field: str) -> int | None:
    """Return a size that Linux reports in kB in a file of /proc; None on other systems."""
    file = Path("/proc", name)
    match = re.search(rf"^{field}:\s+(\d+) kB", file.read_text(), re.MULTILINE) if file.exists() else None
    return int(match[1]) * 1024 if match else None


def busy_cpu_seconds() -> float | None:
    """Return the CPU time that all processes have used, steal time included; None if the system does not count it."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return None
    user, nice, system, _idle, _wait, irq, softirq, steal, *_ = map(int, stat.read_text().split("\n", 1)[0].split()[1:])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def library_versions() -> dict[str, str]:
    """Return the installed versions of the libraries that results depend on."""
    versions = {}
    for name in _LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


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


# Arm CPUs report part numbers, not names; these are the common cloud servers.
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
