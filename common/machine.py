"""The machine of a measurement, as data and as the name of its folder under results/.

python -m common.machine
"""

import importlib.metadata
import json
import os
import platform
import re
import subprocess
from pathlib import Path

import torch

PACKAGES = ("torch", "tensordict", "gymnasium", "numpy", "mujoco", "envpool")
PACKAGES += ("stable-baselines3", "sb3-contrib", "sbx-rl", "jax")  # the peers


def machine():
    """Processor, cores, memory in GiB, GPU and driver (None without one) and versions; no host names."""
    cuda = torch.cuda.is_available()
    return {
        "cpu": processor(Path("/proc/cpuinfo")),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30),
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "driver": nvidia_smi("driver_version").get("driver_version") if cuda else None,
        "cuda": torch.version.cuda,
        "packages": {"python": platform.python_version()} | versions(),
    }


def processor(cpuinfo):
    """The processor's name without extras, such as "AMD EPYC" or "Intel Xeon Platinum 8481C"."""
    text = cpuinfo.read_text(encoding="utf-8") if cpuinfo.exists() else ""
    found = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    name = found[1] if found else platform.machine()
    name = re.sub(r"\((R|TM|tm)\)|@.*|\bCPU\b|\bProcessor\b|\b\d+-Core\b", " ", name)
    return " ".join(name.split())


def nvidia_smi(*names):
    """What nvidia-smi says of the first GPU, by name; empty if it says nothing."""
    command = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader"]
    try:
        line = subprocess.run(command, capture_output=True, encoding="utf-8", check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return {}
    return dict(zip(names, map(str.strip, line.split(",")), strict=True))


def versions():
    """Versions of the installed PACKAGES."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def slug(machine):
    """The folder of a machine, named after its GPU or processor and its cores, such as "nvidia-h200-16-cores"."""
    name = f"{machine['gpu'] or machine['cpu']} {machine['cores']} cores"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def describe(machine):
    """The machine in words, such as "2-core AMD EPYC, 24 GiB"."""
    words = f"{machine['cores']}-core {machine['cpu']}, {machine['memory_gib']} GiB"
    return f"{machine['gpu']} (driver {machine['driver']}), {words}" if machine["gpu"] else words


def where(machine):
    """The machine and its torch, in words."""
    return f"{describe(machine)}, torch {machine['packages']['torch']}"


if __name__ == "__main__":
    print(json.dumps(machine(), indent=2))
    print(slug(machine()))
