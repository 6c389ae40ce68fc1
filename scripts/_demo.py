"""What the store does, on a small tree of model-like files: run by scripts/demo."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from smartcache import Store, load_settings

MEGABYTE = 1_000_000
FILES = {
    # name: (seed, megabytes); equal seeds are equal files
    "ComfyUI/models/checkpoints/dream-xl.safetensors": (1, 24),
    "ComfyUI/models/vae/xl-vae.safetensors": (2, 8),
    "ComfyUI/models/text_encoders/clip-l.safetensors": (3, 12),
    "webui/models/Stable-diffusion/dream-xl.safetensors": (1, 24),
    "webui/models/VAE/sdxl.vae.safetensors": (2, 8),
    "training/base/dream-xl.safetensors": (1, 24),
    "training/base/text_encoder/model.safetensors": (3, 12),
    "training/base/config.json": (4, 0),
}


def main() -> None:
    """Show the usage before and after, verify, undo, and prove that every byte is as it was."""
    room = Path(tempfile.mkdtemp(prefix="smartcache-demo-"))
    try:
        demonstrate(room)
    finally:
        shutil.rmtree(room)
        say(f"Removed {room}: nothing of this demo is left.")


def demonstrate(room: Path) -> None:
    """Run the demo in a folder of its own."""
    models = room / "models"
    os.environ["SMARTCACHE_HOME"] = str(room / "store")
    say(f"Three programs, eight files, in {models}:")
    before = make(models)
    run("df", str(models))

    say("The first file of each content becomes the blob, in place; the others become links to it.")
    store = Store(settings=load_settings(home=room / "store"))
    with store, store.batch("demo"):
        # Small files and json are left alone: programs edit them in place.
        weights = sorted(path for path in before if path.suffix == ".safetensors")
        found = list(store.adopt_many(weights))
        copies = [(item.path, item.digest) for item in found if item.outcome == "duplicate"]
        freed = sum(result.freed for result in store.replace_many(copies))
    count = len(found) - len(copies)
    print(f"{count} different contents; {freed / MEGABYTE:.0f} MB given back to the disk\n")
    run("df", str(models))
    run("df")
    run("ls", "--sort", "size")

    say("Every blob is hashed again:")
    run("verify", "--full")

    say("And everything is taken back: each file gets its own bytes, its mode and its time.")
    run("undo", "--all", "--yes")
    run("df", str(models))
    after = {path: state(path) for path in before}
    if after != before:
        sys.exit("The files are not what they were: please report this.")
    print("Every file is what it was: bytes, mode, time.\n")


def make(models: Path) -> dict[Path, tuple[int, int, bytes]]:
    """Write the files, a little old; return what each is like."""
    for name, (seed, megabytes) in FILES.items():
        path = models / name
        path.parent.mkdir(parents=True, exist_ok=True)
        data = random.Random(seed).randbytes(megabytes * MEGABYTE) or b'{"steps": 30}\n'
        path.write_bytes(data)
        os.utime(path, (1_700_000_000 + seed, 1_700_000_000 + seed))
    return {models / name: state(models / name) for name in FILES}


def state(path: Path) -> tuple[int, int, bytes]:
    """Return the mode, time and bytes of a file."""
    st = path.stat()
    return st.st_mode, st.st_mtime_ns, path.read_bytes()


def run(*arguments: str) -> None:
    """Show a command and what it prints."""
    shown = " ".join(arguments)
    print(f"$ smartcache {shown}", flush=True)
    subprocess.run([sys.executable, "-m", "smartcache", *arguments], check=True)
    print(flush=True)


def say(text: str) -> None:
    """Show a line of explanation."""
    print(f"\033[1m{text}\033[0m" if sys.stdout.isatty() else text, flush=True)


if __name__ == "__main__":
    main()
