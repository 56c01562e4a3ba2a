"""What every process of a run tells of itself before it begins, and what must be the same in all of them.

Processes that run other code, other packages or another config would not fail: they would wait for each other in different places, or train
on figures that do not belong together. So this is compared before JAX starts and any weight is loaded (`trace_jax.processes.membership`).
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import pathlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from trace_jax.config import ROOT, Config, data_folder
from trace_jax.config.fields import fields
from trace_jax.processes.membership import Member
from trace_jax.workdir import package_versions, source_revision

_FOLDERS = ("trace_jax", "rl", "model", "envs")
_DATA = ("configs", "prompts")
_ACCELERATORS = ("libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin")  # packages of these, beside those that a workdir records
_VENDORS = ("0x1ae0", "0x10de")  # Google, NVIDIA
# of PCI: displays, processing accelerators, and TPUs, which name none; not the same vendors' network and disk
_CLASSES = ("0x03", "0x12", "0xff")
_SHOWN = 3  # differences of a process that the message names


def facts(command: str, flags: Mapping[str, Any], config: Config) -> dict[str, str | None]:
    """What must be the same in all processes, by name; None: not known here, so that it is not compared.

    Args:
      flags: of the command, without those that say which process this is.
    """
    revision = source_revision()
    told = {"source revision": revision and revision.removesuffix("+changes")}  # what was changed, the files say
    told |= {f"file {name}": digest for name, digest in file_digests().items()}
    told |= {f"package {name}": version for name, version in package_versions().items()}
    told |= {f"package {name}": version for name in _ACCELERATORS if (version := _version(name))}
    told |= {"accelerators": _chips(), "JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS") or "not set", "command": command}
    told |= {f"--{name}": str(value) for name, value in flags.items() if name != "config"}
    return told | {f"config field {name!r}": str(value) for name, _, value in fields(config)}


def difference(members: Sequence[Member]) -> str | None:
    """How processes differ from process 0, which hosts they are on, and the fix, in one line; None where all are alike."""
    first, found = members[0], defaultdict(list)
    for member in members[1:]:
        names = [n for n in dict.fromkeys([*first.facts, *member.facts]) if None not in (_fact(first, n), _fact(member, n))]
        if differing := [name for name in names if _fact(first, name) != _fact(member, name)]:
            found[tuple((name, _fact(member, name), _fact(first, name)) for name in differing)].append(member)
    if not found:
        return None
    lines = []
    for differing, others in found.items():
        shown = "; ".join(f"{name} is {theirs} there, {ours} here" for name, theirs, ours in differing[:_SHOWN])
        more = f"; and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
        lines.append(f"{' and '.join(map(str, others))}: {shown}{more}")
    code = any(name.startswith(("source", "file", "package")) for differing in found for name, _, _ in differing)
    push, start = (
        "Push the same revision, with the same packages, to all hosts (tpu_scripts/)",
        "Start all with the same command, on hosts alike",
    )
    return f"the processes of the run are not alike, as seen from {first}: {'. '.join(lines)}. {push if code else start}"


def file_digests() -> dict[str, str]:
    """Every file that the packages have, as they lie on this host, by its path."""
    roots = {name: ROOT / name for name in _FOLDERS} | {name: data_folder(name) for name in _DATA}
    found = {}
    for name, root in roots.items():
        for path in sorted(pathlib.Path(root).rglob("*")):
            inner = path.relative_to(root)
            if path.is_file() and path.suffix != ".pyc" and not any(part.startswith(".") for part in inner.parts):
                found[f"{name}/{inner.as_posix()}"] = hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()
    return found


def _fact(member: Member, name: str) -> str | None:
    return member.facts.get(name, "not there")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _chips() -> str:
    """`4 x 0x1ae0:0x0063`: what the PCI bus holds of accelerators; JAX is asked later, when it has started."""
    counts: dict[str, int] = defaultdict(int)
    for folder in pathlib.Path("/sys/bus/pci/devices").glob("*"):
        vendor, kind, device = ((folder / name).read_text().strip() for name in ("vendor", "class", "device"))
        if vendor in _VENDORS and kind.startswith(_CLASSES):
            counts[f"{vendor}:{device}"] += 1
    return ", ".join(f"{count} x {name}" for name, count in sorted(counts.items())) or "none"
