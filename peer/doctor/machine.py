"""Checks of this machine alone. Each returns findings; ``command`` turns what it raises into a finding."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import p2ptrain
from p2ptrain.base import cgroups, udp_filter
from p2ptrain.base.documents import document
from p2ptrain.base.errors import DeviceError
from p2ptrain.base.system_tool import ToolError, output_of
from p2ptrain.cli import platform_fault
from p2ptrain.manifest import Manifest, parameter_count
from peer.doctor.findings import Finding, bad, note, ok
from peer.owner.settings import CompileMode
from peer.training.lan_address import LanAddress, interface_of

if TYPE_CHECKING:
    import torch

    from p2ptrain.tokens.store import ShardStore

AMD_BYTES = 6_000_000_000
"""Memory from which a chip of AMD is taken for a card. Guess: what chips inside processors get."""
PROXIES = frozenset({"HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"})


def versions() -> list[Finding]:
    fault = platform_fault(sys.version_info[:2], sys.platform)
    found = [f"p2ptrain {p2ptrain.__version__}", f"Python {platform.python_version()}", platform.platform(terse=True)]
    if fault is not None:
        return [bad("versions", fault.problem, fault.remedy)]
    for package in ("torch", "hivemind"):
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            fix = "Reinstall p2ptrain with pip, which installs its dependencies."
            return [bad("versions", f"{package} is not installed", fix)]
    return [ok("versions", ", ".join(found))]


def udp() -> list[Finding]:
    if reason := udp_filter.unavailable():
        words = f"strangers can make the network daemon p2pd speak QUIC over UDP: {reason}"
        page = document("SECURITY.md")
        return [note("udp", words, f"Use Linux on x86-64 or ARM64, or see Known faults of p2pd in {page}.")]
    return [ok("udp", "a seccomp filter will keep the network daemon p2pd from using it")]


def container() -> list[Finding]:
    """Report limits of CPU, memory and processes that a container or service has; nothing without them."""
    limits, found = cgroups.limits(), []
    if limits.cpus < (os.cpu_count() or 1):
        found.append(f"{limits.cpus:g} CPUs")
    if limits.memory_bytes < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"):
        found.append(f"{limits.memory_bytes / 1e9:.1f} GB of memory")
    if limits.free_pids < cgroups.NEEDED_PIDS * 10:
        found.append(f"{limits.free_pids:g} more processes and threads")
    cgroups.check_pids()
    return [ok("container", f"its limits: {', '.join(found)}")] if found else []


def proxies(environment: Mapping[str, str]) -> list[Finding]:
    """Report proxies in the environment, which only some connections use; nothing without them."""
    names = sorted(name for name in environment if name.upper() in PROXIES and environment[name])
    if not names:
        return []
    words = f"{', '.join(names)}: used for downloads from the Hugging Face hub; peers connect directly, without a proxy"
    return [note("proxy", words, "If only the proxy reaches the internet, join from another network.")]


def device(name: str) -> list[Finding]:
    """Report the devices that would train, what each computes with, and a GPU that torch cannot use."""
    import torch

    from p2ptrain.train import accelerator
    from peer.training.devices import choose_devices

    several = choose_devices(name, tries=True)
    if len(several) > 1:
        return [each for chosen in several for each in device(str(chosen))]
    (chosen,) = several
    kernels = f"; {_kernels(chosen)}"
    if chosen.type != "cpu":
        driver = f", driver {card[1]}" if chosen.type == "cuda" and (card := _driver()) else ""
        memory = f"{accelerator.total_bytes(chosen) / 1e9:.1f} GB"
        return [ok("device", f"{accelerator.product_name(chosen)}, {memory}{driver}{kernels}")]
    found = f"CPU, {cgroups.usable_cpus()} cores"
    card = _driver()
    if card is not None and name == "auto":
        fix = (
            "Install a torch build for that driver (pytorch.org, Get Started). "
            if torch.version.cuda is None
            else "Update the driver, or install a torch build for the present one. "
        )
        words = f"{found}{kernels}; this torch ({torch.__version__}) does not use the {card[0]}, driver {card[1]}"
        return [note("device", words, f"{fix}Training on the CPU works, but is slow.")]
    if name == "auto" and (memory_bytes := _amd_bytes()) >= AMD_BYTES:
        words = f"this torch ({torch.__version__}) does not use the card of AMD with {memory_bytes / 1e9:.1f} GB"
        fix = "Install a torch build for ROCm (pytorch.org, Get Started). Training on the CPU works, but is slow."
        return [note("device", f"{found}{kernels}; {words}", fix)]
    return [ok("device", f"{found}{kernels}")]


def _kernels(chosen: torch.device) -> str:
    """Return the types in which a device computes matrix products."""
    import torch

    from p2ptrain.train import accelerator

    half = str(accelerator.half_type(chosen)).removeprefix("torch.")
    if chosen.type == "cpu":
        products = f"bfloat16 and fp32, {torch.backends.cpu.get_cpu_capability()}"
        products = products if accelerator.has_fast_bf16() else products.removeprefix("bfloat16 and ")
    else:
        products = f"{half} and {'TF32' if accelerator.has_tf32(chosen) else 'fp32'}"
    return f"matrix products in {products}"


def compiler(name: str, mode: CompileMode, environment: Mapping[str, str]) -> list[Finding]:
    """Report whether the training step can be compiled; nothing for devices for which it is not.

    Args:
        mode: what the owner wants.
    """
    from p2ptrain.train.accelerator import triton_fault
    from p2ptrain.train.compiling import compiler_program
    from peer.training.devices import choose_devices

    kinds = {each.type: each for each in choose_devices(name)}
    if (chosen := kinds.get("cuda") or kinds.get("cpu")) is None:
        return []
    if mode == "off":
        fix = 'Set compile = "auto" in settings.toml: compiled code makes training faster.'
        return [note("compiler", "compile is off", fix)]
    program = compiler_program(environment)
    if program is None:
        fix = "Install one: apt install g++ (Debian, Ubuntu), dnf install gcc-c++ (Fedora)."
        return [note("compiler", "there is no C++ compiler, which would make training faster", fix)]
    if chosen.type == "cuda" and (fault := triton_fault(chosen)):
        return [note("compiler", f"training on this card is not compiled: {fault}")]
    return [ok("compiler", f"{program}{' and Triton' if chosen.type == 'cuda' else ''}; makes training faster")]


def other_ranks(team: int | None, at: str | None, name: str) -> int:
    """Return how many ranks other computers bring. Raises UserError if the options are wrong."""
    from peer.training import devices

    return devices.other_ranks(team, at, devices.choose_devices(name))


def team(at: str | None) -> list[Finding]:
    """Check that other computers of the network can join here; nothing if no address is given."""
    if at is None:
        return []
    place = LanAddress.parse(at)
    interface = interface_of(place.host)
    if fault := place.fault_to_listen():
        fix = f"Stop the other program ({_listing(place.port)} names it), or name another port: --at {place.host}:PORT."
        return [bad("team", f"cannot listen at {place}: {fault.strerror}", fix)]
    return [ok("team", f"other computers can join at {place} ({interface}); nothing between them is encrypted")]


def memory(
    manifest: Manifest | None, name: str, allowed_bytes: float, stages: int | None = None, others: int = 0
) -> list[Finding]:
    """Check that the run's model fits the memory of this machine and what the owner allows in settings.toml.

    Args:
        others: ranks on other computers.
    """
    from peer.capacity import activation_bytes, check_memory, installed_memory
    from peer.training.devices import choose_devices, mesh_of

    there = f"{installed_memory() / 1e9:.1f} GB"
    if manifest is None:
        return [ok("memory", f"{there}; give a join LINK to check what its run needs")]
    arranged = ""
    try:
        chosen, *rest = choose_devices(name, tries=True)
        if rest or others or (stages or 1) > 1:
            devices = [chosen, *rest]
            allowed_bytes = min(allowed_bytes, installed_memory())
            mesh = mesh_of(manifest, devices, stages, allowed_bytes, others)
            if others:
                return [ok("memory", f"{there}; {mesh}, and whether they fit is seen when all have joined")]
            arranged = f", in {mesh}"
        else:
            check_memory(manifest, chosen)
            activation_bytes(manifest, chosen, allowed_bytes)
    except DeviceError as error:
        return [bad("memory", error.problem, error.remedy)]
    return [ok("memory", f"{there}, enough for the run's {parameter_count(manifest.model):,} parameters{arranged}")]


def disk(home: Path, manifest: Manifest | None) -> list[Finding]:
    from peer.messages import size
    from peer.space import home_bytes, room

    place, free = room(home)
    if free is None:
        return [bad("disk", f"{place} is not writable", "Choose a directory that you can write to, with --home.")]
    there, needed = f"{size(free)} free at {place}", home_bytes(home, manifest)
    if free < needed:
        more = f"Free {size(needed - free)} there, or choose another disk with --home."
        return [bad("disk", f"{there}, but the home may take {size(needed)}", more)]
    return [ok("disk", there)]


def cache(store: ShardStore, home: Path, manifest: Manifest | None) -> list[Finding]:
    """Check the free disk space for the run's text, and for the home if it is on the same disk."""
    from peer.messages import size
    from peer.space import home_bytes, room, share_disk, text_bytes, token_bytes

    place, free = room(store.directory)
    if free is None:
        fix = "Set XDG_CACHE_HOME to a directory that you can write to."
        return [bad("cache", f"{place} is not writable", fix)]
    there = f"{size(free)} free at {place}"
    if manifest is None:
        return [ok("cache", f"{there}; give a join LINK to check what its run needs")]
    beside, its_free = room(home)
    shares = its_free is not None and share_disk(beside, place)
    needed = token_bytes(store, manifest, text_bytes(None)) + (home_bytes(home, manifest) if shares else 0)
    if free < needed:
        more = f"Free {size(needed - free)} there, or set XDG_CACHE_HOME to a directory on another disk."
        what = "the home and the run's text" if shares else "the run's text"
        return [bad("cache", f"{there}, but {what} may take {size(needed)}", more)]
    return [ok("cache", there)]


def port(host: str, number: int, is_named: bool) -> list[Finding]:
    """Check that a port is free; if not, the finding is BAD only for a port that the owner named."""
    if error := _fault_to_listen(host, number):
        words = f"cannot listen on TCP port {number}: {error.strerror}"
        if not is_named:
            return [note("port", f"{words}; a peer without --listen uses another one")]
        fix = (
            f"Stop the other program ({_listing(number)} names it), or choose another port with --port."
            if error.errno in (48, 98)  # EADDRINUSE of macOS and Linux
            else "Choose a port above 1023 with --port."
        )
        return [bad("port", words, fix)]
    return [ok("port", f"TCP port {number} is free")]


def _fault_to_listen(host: str, port: int) -> OSError | None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error
    return None


def _listing(number: int) -> str:
    return f"lsof -iTCP:{number}" if sys.platform == "darwin" else f"ss -ltnp sport = :{number}"


def _amd_bytes(root: Path = Path("/sys/class/drm")) -> int:
    """Return the memory of the largest card of AMD, from Linux's driver amdgpu; 0 if there is none."""
    found = [0]
    for path in root.glob("card[0-9]*/device/mem_info_vram_total"):
        with contextlib.suppress(OSError, ValueError):
            found.append(int(path.read_text()))
    return max(found)


def _driver() -> tuple[str, str] | None:
    """Return the name and driver of the first NVIDIA GPU, from nvidia-smi; None if there is none."""
    try:
        answer = output_of("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    except ToolError:
        return None
    name, _, driver = (answer.splitlines() or [""])[0].partition(", ")
    return (name, driver) if name else None
