"""This checkout as an installed package, without installing it: folders of links, commands, and what they need in the environment.

On a machine with nothing but the dependencies `import samebits` fails, since its folders lie beside each other in the repository, and vLLM
finds the plugin by the entry point of an installed distribution. `OUT/env/site` has both, and comes first on the path, so that what is
measured is this checkout whatever else is installed. `OUT/env/bin` has `samebits` and `python` with the interpreter of the queue.
"""

from __future__ import annotations

import os
import shutil
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""The checkout."""
PACKAGE = "samebits"
CACHES = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor", "VLLM_CACHE_ROOT": "vllm"}
"""Variables of caches that are kept in `OUT/cache`, so that another machine can be given them (`pack`)."""


def prepare(out: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Write `out/env`; returns `environment` with what commands of a plan need. The GPUs are left to the caller."""
    site, commands = out / "env" / "site", out / "env" / "bin"
    shutil.rmtree(out / "env", ignore_errors=True)
    commands.mkdir(parents=True)
    _link(site)
    for name, arguments in {"python": "", PACKAGE: f" -m {PACKAGE}.recipes.cli"}.items():
        path = commands / name
        path.write_text(f'#!/bin/sh\nexec "{sys.executable}"{arguments} "$@"\n')
        path.chmod(0o755)
    found = dict(environment)
    for name, folder in CACHES.items():
        found.setdefault(name, str(out / "cache" / folder))
    found["OUT"] = str(out)
    found["PATH"] = os.pathsep.join([str(commands), *filter(None, [found.get("PATH", os.defpath)])])
    found["PYTHONPATH"] = os.pathsep.join([str(site), str(ROOT), *filter(None, [found.get("PYTHONPATH")])])
    found.setdefault("PYTHONUNBUFFERED", "1")  # or a log ends long before what ran
    found.setdefault("COLUMNS", "160")  # tables in logs are not cut
    return found


def _link(site: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders: dict[str, str] = project["tool"]["setuptools"]["package-dir"]
    package = site / PACKAGE
    package.mkdir(parents=True)
    for name, folder in folders.items():
        source = ROOT / folder
        if name == PACKAGE:
            for file in source.glob("*.py"):
                (package / file.name).symlink_to(file)
        else:
            (package / name.removeprefix(f"{PACKAGE}.")).symlink_to(source)
    about = site / f"{PACKAGE}-{project['project']['version']}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: {project['project']['version']}\n")
    groups = project["project"].get("entry-points", {})
    lines = [f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items()) for group, entries in groups.items()]
    (about / "entry_points.txt").write_text("\n".join(lines))
