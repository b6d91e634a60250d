"""What a trace of torch.profiler says about the GPU: launches, the share of time it was busy, and gaps."""

import json
from collections import defaultdict

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of events
ON_HOST = ("cuda_runtime", "cuda_driver")
GAPS = (0, 1, 2, 5, 10, 50)  # us
NO_KERNELS = "the trace has no kernel: the profiler could not read the GPU (CUPTI)"


def summary(path, steps):
    """What the trace at `path` says about each of its `steps` steps; times are in us.

    A gap is a time between two launches on the device in which it was idle.
    """
    events = [event for event in json.loads(path.read_text(encoding="utf-8"))["traceEvents"] if event.get("ph") == "X"]
    on_device = sorted((e for e in events if e.get("cat") in ON_DEVICE), key=lambda event: event["ts"])
    found = {"steps": steps, "host": totals((e for e in events if e.get("cat") in ON_HOST), steps, 15)}
    if not on_device:
        return found | {"failed": NO_KERNELS}
    busy, gaps = 0.0, []
    begin = end = on_device[0]["ts"]
    for event in on_device:
        start, until = event["ts"], event["ts"] + event["dur"]
        if start > end:
            gaps.append((start - end, event["name"]))
        busy += max(0.0, until - max(start, end))
        end = max(end, until)
    long = {f"over {limit} us": [us for us, _ in gaps if us > limit] for limit in GAPS}
    return found | {
        "launches_per_step": len(on_device) / steps,
        "launches": {kind: sum(e["cat"] == kind for e in on_device) / steps for kind in ON_DEVICE},
        "us_per_step": (end - begin) / steps,
        "busy_us_per_step": busy / steps,
        "busy_share": busy / (end - begin),
        "gaps_per_step": {name: len(own) / steps for name, own in long.items()},
        "gap_us_per_step": {name: sum(own) / steps for name, own in long.items()},
        "longest_gaps": [[round(us, 1), f"before {name[:60]}"] for us, name in sorted(gaps, reverse=True)[:12]],
        "streams": sorted({str(event.get("args", {}).get("stream")) for event in on_device}),
        "kernels": totals(on_device, steps, 45),
    }


def totals(events, steps, most):
    """[name, number per step, us per step] of at most `most` kinds of events, the longest first."""
    durations = defaultdict(list)
    for event in events:
        durations[event["name"][:110]].append(event["dur"])
    rows = [[name, round(len(us) / steps, 2), round(sum(us) / steps, 2)] for name, us in durations.items()]
    return sorted(rows, key=lambda row: -row[2])[:most]
