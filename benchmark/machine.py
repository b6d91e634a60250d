"""The machine that measures, as results name it: no host names, nothing that tells whose it is."""

import os
import platform
import re
from importlib.metadata import version
from pathlib import Path

import torch


def machine():
    """Processor, cores, memory in GiB, GPU, and versions of the packages that speed depends on."""
    names = re.findall(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.M)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": names[0] if names else platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "versions": {name: version(name) for name in ("torch", "tensordict", "gymnasium", "numpy")},
    }


def slug():
    """The machine's folder under results/, such as amd-epyc-2-cores."""
    this = machine()
    name = f"{this['gpu'] or this['cpu']} {this['cores']} cores"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
