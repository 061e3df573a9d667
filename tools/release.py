"""Builds and publishes a release: `python -m tools.release [--dry-run]`.

The release is what the tag of the current commit names: v1.2.3 is version 1.2.3.  Wheel and sdist
are made twice from the committed files and must be equal byte by byte.  A dry run does all but
upload, and prints what it would do (docs/how-to/release.md).
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
TAG = re.compile(r"v(\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?)")
VERSION_FILE = "common/popmq/common/version.py"


class ReleaseRefused(Exception):
    pass


def output_of(command: Sequence[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ReleaseRefused(f"{' '.join(command)}: {done.stdout}{done.stderr}".strip())
    return done.stdout.strip()


def tagged_version(root: Path) -> str:
    """The version that the tag of the current commit names; raises ReleaseRefused without one."""
    tags = output_of(["git", "tag", "--points-at", "HEAD"], root).split()
    versions = [match[1] for tag in tags if (match := TAG.fullmatch(tag))]
    if len(versions) != 1:
        raise ReleaseRefused(
            f"the current commit has {len(versions)} tags such as v1.2.3, and needs one: "
            f"its tags are {tags}"
        )
    return versions[0]


def complaints(root: Path, version: str) -> Iterator[str]:
    """Files whose version is not that of the tag."""
    source = (root / VERSION_FILE).read_text(encoding="utf-8")
    chart = yaml.safe_load((root / "charts/popmq/Chart.yaml").read_text(encoding="utf-8"))
    images = json.loads((root / "docker-bake.json").read_text(encoding="utf-8"))
    written = {
        VERSION_FILE: (re.findall(r'^VERSION = "(.+)"', source, re.MULTILINE) or [""])[0],
        "charts/popmq/Chart.yaml (version)": chart["version"],
        "charts/popmq/Chart.yaml (appVersion)": chart["appVersion"],
        "docker-bake.json (TAG)": images["variable"]["TAG"]["default"],
    }
    for place, written_version in written.items():
        if written_version != version:
            yield f"{place} has version {written_version}, and the tag v{version}"
    changes = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    if f"\n## [{version}]" not in changes:
        yield f"CHANGELOG.md has no section [{version}]"


def build(root: Path, folder: Path) -> list[Path]:
    """The wheel and the sdist of the committed files, in `folder`."""
    environment = {
        **os.environ,
        "SOURCE_DATE_EPOCH": output_of(["git", "log", "-1", "--format=%ct"], root),
    }
    environment.pop("POPMQ_COMPILED", None)
    with tempfile.TemporaryDirectory() as scratch:
        archive = Path(scratch) / "source.tar"
        output_of(["git", "archive", "--output", str(archive), "HEAD"], root)
        source = Path(scratch) / "source"
        source.mkdir()
        output_of(["tar", "-xf", str(archive), "-C", str(source)], root)
        command = [sys.executable, "-m", "hatchling", "build", "--directory", str(folder)]
        done = subprocess.run(
            command, cwd=source, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise ReleaseRefused(f"the build failed:\n{done.stdout}{done.stderr}")
    return sorted(folder.iterdir())


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def reproduced(root: Path, folder: Path) -> list[Path]:
    """The files of a release; raises ReleaseRefused when a second build gives other bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise ReleaseRefused(f"{folder} is not empty: choose another one with --output")
    files = build(root, folder)
    with tempfile.TemporaryDirectory() as second:
        for again in build(root, Path(second)):
            if digest(again) != digest(folder / again.name):
                raise ReleaseRefused(f"a second build of {again.name} differs from the first")
    output_of([sys.executable, "-m", "twine", "check", "--strict", *map(str, files)], root)
    return files


def publish(commands: Sequence[Sequence[str]], root: Path, *, dry_run: bool) -> None:
    for command in commands:
        print(f"{'would run' if dry_run else 'running'}: {' '.join(command)}", flush=True)
        if not dry_run:
            subprocess.run(command, cwd=root, check=True)


def release(root: Path, output: Path, *, dry_run: bool) -> None:
    version = tagged_version(root)
    wrong = list(complaints(root, version))
    if changed := output_of(["git", "status", "--porcelain"], root):
        wrong.append(f"files are changed and not committed:\n{changed}")
    if wrong:
        raise ReleaseRefused("\n".join(wrong))
    files = reproduced(root, output)
    if [path for path in files if f"popmq-{version}" not in path.name]:
        raise ReleaseRefused(f"the build made {[path.name for path in files]}")
    print(f"popmq {version}: two builds were equal, and their metadata is good")
    for path in files:
        print(f"{digest(path)}  {path.name}")
    upload = [sys.executable, "-m", "twine", "upload", *map(str, files)]
    publish(
        [upload, ["docker", "buildx", "bake", "--push"], ["git", "push", "origin", f"v{version}"]],
        root,
        dry_run=dry_run,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument("--dry-run", action="store_true", help="publish nothing")
    parser.add_argument("--output", type=Path, default=ROOT / "dist", metavar="DIR")
    arguments = parser.parse_args()
    try:
        release(ROOT, arguments.output, dry_run=arguments.dry_run)
    except ReleaseRefused as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
