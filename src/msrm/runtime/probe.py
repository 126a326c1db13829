"""What JAX sees, asked without risk: in this process only when its devices are already up, else in a child.

A CUDA plugin that does not match the driver or JAX can abort the importing process (DESIGN 11), and starting the
devices takes three quarters of a card's memory; a child process takes both away with it.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

__all__ = ["jax_facts", "probe_jax"]

_MARK = "msrm-jax-facts:"
_CHILD = f"""
import json
import jax
from msrm.runtime.probe import _facts
print({_MARK!r} + json.dumps(_facts(jax)))
"""


def jax_facts() -> dict[str, Any] | None:
    """What JAX runs on in this process; None when it was not imported or has not started its devices."""
    jax = sys.modules.get("jax")
    bridge = sys.modules.get("jax._src.xla_bridge")
    # No public call tells whether devices are up without starting them.
    if jax is None or not getattr(bridge, "backends_are_initialized", lambda: False)():
        return None
    return _facts(jax)


def probe_jax(*, timeout: float = 120.0) -> dict[str, Any] | None:
    """Import JAX and start its devices in a child process, and return what it found.

    Parameters
    ----------
    timeout : float
        Seconds after which the child is ended.

    Returns
    -------
    dict or None
        ``version``, ``platform``, ``devices`` [{kind, platform, memory}], ``x64``, ``matmul_precision``,
        ``compilation_cache``; ``{"error": text}`` when JAX or its plugin fails; None when JAX is not installed.
    """
    if find_spec("jax") is None:
        return None
    # A child that takes no more memory than it needs does not disturb others on the card.
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    try:
        child = subprocess.run(
            [sys.executable, "-c", _CHILD], capture_output=True, text=True, timeout=timeout, env=environment
        )
    except subprocess.TimeoutExpired:
        return {"error": f"JAX did not start within {timeout:g} s"}
    for line in child.stdout.splitlines():
        if line.startswith(_MARK):
            return json.loads(line.removeprefix(_MARK)) | {"warnings": _tail(child.stderr)}
    how = f"was ended by signal {-child.returncode}" if child.returncode < 0 else f"ended with {child.returncode}"
    return {"error": f"starting JAX {how}: {_tail(child.stderr) or 'no message'}"}


def _facts(jax: Any) -> dict[str, Any]:
    """Plain facts of an imported JAX; starts its devices."""
    return {
        "version": jax.__version__,
        "platform": jax.default_backend(),
        "devices": [_device(device) for device in jax.devices()],
        "x64": bool(jax.config.jax_enable_x64),
        "matmul_precision": jax.config.jax_default_matmul_precision,
        "compilation_cache": jax.config.jax_compilation_cache_dir,
    }


def _device(device: Any) -> dict[str, Any]:
    """Kind, platform and memory (bytes; None where the platform does not tell) of one device."""
    memory = device.memory_stats() or {}
    return {
        "kind": device.device_kind,
        "platform": device.platform,
        "memory": memory.get("bytes_limit"),
        "memory_in_use": memory.get("bytes_in_use"),
    }


def _tail(text: str) -> str:
    """The last line of a child's standard error, which names the exception."""
    return (text.strip().splitlines() or [""])[-1].strip()
