"""`softplus-attention data prepare` compared with the tokenizers library on the same text and number of threads.

Each round runs, in separate processes: `data prepare` from the compressed file to the checked shards, then
`encode_batch_fast` (no offsets) and `encode_batch` over documents in memory, whose ids are discarded. The table shows
medians in MB of UTF-8 text per second, and per second of processor time over all threads, which other load affects
less. With --copies N, `data prepare` also runs once on a folder of N copies of the file.
"""

from __future__ import annotations

import argparse
import datetime
import gzip
import json
import lzma
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from figures import write

from softplus_attention.utils import provenance

ROOT = Path(__file__).resolve().parents[1]
PLAIN = ("encode_batch_fast", "encode_batch")
OPENERS = {".xz": lzma.open, ".gz": gzip.open, ".jsonl": open}
DOCUMENTS_AT_ONCE = 512


def plain(method: str, corpus: Path, tokenizer: Path) -> list[float]:
    """Seconds and processor seconds to encode the documents, in batches because keeping all results takes time."""
    from tokenizers import Tokenizer

    with OPENERS[corpus.suffix](corpus, "rb") as file:
        texts = [json.loads(line)["text"] for line in file]
    encode = getattr(Tokenizer.from_file(str(tokenizer)), method)
    start, used = time.perf_counter(), time.process_time()
    for first in range(0, len(texts), DOCUMENTS_AT_ONCE):
        encode(texts[first : first + DOCUMENTS_AT_ONCE], add_special_tokens=False)
    return [time.perf_counter() - start, time.process_time() - used]


def used_by_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def prepared(source: Path, tokenizer: Path, threads: int) -> tuple[list[float], dict[str, int]]:
    """Seconds and processor seconds of the whole command including its start, and its counts."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "out"
        command = [sys.executable, "-m", "softplus_attention.cli", "data", "prepare", str(source)]
        command += ["--output", str(output), "--tokenizer", str(tokenizer), "--workers", str(threads)]
        start, used = time.perf_counter(), used_by_children()
        subprocess.run(command, check=True, capture_output=True)
        seconds = [time.perf_counter() - start, used_by_children() - used]
        index = json.loads((output / "index.json").read_text())
    tokens = sum(split["tokens"] for split in index["splits"].values())
    return seconds, {**index["counts"], "tokens": tokens}


def time_in_process(method: str, options: argparse.Namespace) -> list[float]:
    environment = {**os.environ, "RAYON_NUM_THREADS": str(options.threads), "TOKENIZERS_PARALLELISM": "true"}
    command = [sys.executable, __file__, str(options.corpus), "--tokenizer", str(options.tokenizer), "--plain", method]
    return json.loads(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path, help="a .jsonl, .jsonl.xz or .jsonl.gz file with a field 'text'")
    parser.add_argument("--tokenizer", type=Path, required=True, help="a tokenizer.json file")
    parser.add_argument("--threads", type=int, default=2, help="workers, and threads of tokenizers (default: 2)")
    parser.add_argument("--rounds", type=int, default=3, help="default: 3")
    parser.add_argument("--copies", type=int, default=0, help="also prepare a folder of this many copies, once")
    parser.add_argument("--commit", help="commit to record (default: from git)")
    parser.add_argument("--output", type=Path, default=ROOT / "results" / "data.json", help="the JSON file to write")
    parser.add_argument("--plain", choices=PLAIN, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.plain:
        print(plain(options.plain, options.corpus, options.tokenizer))
        return 0
    seconds: dict[str, list[list[float]]] = {name: [] for name in ("prepare", *PLAIN)}
    counts: dict[str, int] = {}
    for _ in range(options.rounds):
        taken, counts = prepared(options.corpus, options.tokenizer, options.threads)
        seconds["prepare"].append(taken)
        for method in PLAIN:
            seconds[method].append(time_in_process(method, options))
        print({name: values[-1] for name, values in seconds.items()}, file=sys.stderr, flush=True)
    speeds, by_processor = (
        {
            name: counts["bytes"] / 1e6 / statistics.median(pair[which] for pair in pairs)
            for name, pairs in seconds.items()
        }
        for which in (0, 1)
    )
    data: dict[str, Any] = {
        "command": provenance.command("benchmarks/data.py"),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": options.commit or provenance.commit(),
        "machine": provenance.machine(),
        "versions": provenance.versions(("tokenizers", "numpy")),
        "threads": options.threads,
        "text": counts,
        "seconds_and_processor_seconds": seconds,
        "megabytes_per_second": speeds,
        "megabytes_per_processor_second": by_processor,
        "prepare_to": {name: speeds["prepare"] / speeds[name] for name in PLAIN},
        "prepare_to_by_processor": {name: by_processor["prepare"] / by_processor[name] for name in PLAIN},
    }
    write(data, options.output)
    for name, speed in speeds.items():
        ratio, other = speeds["prepare"] / speed, by_processor["prepare"] / by_processor[name]
        print(f"{name:<20}{speed:6.2f} MB/s; prepare / {name}: {ratio:.2f}, by processor time {other:.2f}", flush=True)
    if options.copies:
        with tempfile.TemporaryDirectory() as folder:
            for number in range(options.copies):
                shutil.copy(options.corpus, Path(folder) / f"{number:03d}-{options.corpus.name}")
            taken, counts = prepared(Path(folder), options.tokenizer, options.threads)
        size = counts["bytes"] / 1e6
        data["copies"] = {
            "text": counts,
            "seconds_and_processor_seconds": taken,
            "megabytes_per_second": size / taken[0],
        }
        write(data, options.output)
        print(f"{size:,.0f} MB in {taken[0]:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
