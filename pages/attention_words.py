"""The sentences of docs/performance.md about results/attention-h200.json: numbers of its rows, and checked claims."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attention_rows import (
    BASELINE,
    FASTEST,
    FILE,
    LEARNED,
    LONG_CACHE,
    OURS,
    SHORT,
    UNIT_KEYS,
    Goal,
    Row,
    column,
    command_of,
    goals,
    of_decoding,
    of_training,
    rows_of,
)
from claims import between, each, holds, hundredths, listed, number, tenths
from page_blocks import plain

RUNS_DIFFER = 0.02  # of a ratio, from machine to machine
WITHOUT_OFFSET = ("lssar p=15 without offset", "lssar learned without offset")
HOST = {"forward": "forward_host_ms", "backward": "backward_host_ms"}


def the_run(results: dict[str, Any]) -> str:
    versions, machine, settings = results["versions"], results["machine"], results["settings"]
    holds(settings["baseline"] == BASELINE and results["inputs"] == "random", "ratios are to FlashAttention-2")
    return (
        f"`{command_of(results)}`, data in [results/{FILE}](../results/{FILE}): {machine['gpu']}, driver "
        f"{machine['driver']}, torch {versions['torch']}, triton {versions['triton']}, commit "
        f"{results['commit'][:7]}. {settings['dtype']}, causal, B·T = {settings['tokens']:,} tokens, random inputs; "
        f"forward / backward in ms, medians of {settings['repetitions']} rounds of `do_bench`; the ratio is that of "
        "forward + backward to torch's FlashAttention-2, the memory that of a training step beyond q, k, v and the "
        "output's gradient. Each kernel passed the correctness check of the same run first." + taken(results["rows"])
    )


def taken(rows: Sequence[Row]) -> str:
    """Which rows are not of this run."""
    found: dict[tuple[str, str], list[int]] = {}
    for row in rows:
        if "commit" in row:
            found.setdefault((row["section"], row["commit"][:7]), []).append(row["length"])
    if not found:
        return ""
    holds(all(section != "train" for section, _ in found), "the times of training are of one run")
    words = []
    for (section, commit), lengths in sorted(found.items()):
        others = [x["length"] for x in rows if x["section"] == section and x.get("commit", "")[:7] != commit]
        of_lengths = f", T = {listed(f'{x:,}' for x in sorted(set(lengths)))}," if others else ""
        words.append(f"`{section}`{of_lengths} at {commit}")
    return (
        f" Of other runs are {listed(words)}: `benchmarks/figures.py --fill` takes them into the file, each row with "
        "its commit and a ratio to its own run."
    )


def host_times(rows: Sequence[Row], contender: str) -> tuple[str, str]:
    """Milliseconds of a forward and of a backward, over all head dimensions and lengths."""
    forward, backward = (between(column(rows_of(rows, contender), word), hundredths) for word in HOST.values())
    return forward, backward


def waits(row: Row) -> bool:
    return any(column([row], host)[0] >= row[f"{part}_ms"] for part, host in HOST.items())


def the_host(results: dict[str, Any]) -> str:
    rows = results["rows"]
    for contender in (OURS, BASELINE, LEARNED):
        holds(not any(map(waits, rows_of(rows, contender))), f"no row of {contender} waits for the host")
    ours, theirs, learned = (host_times(rows, contender) for contender in (OURS, BASELINE, LEARNED))
    near = [rows_of(rows, contender, head_dim=64, length=SHORT)[0] for contender in WITHOUT_OFFSET]
    host, gpu = column(near, HOST["forward"]), column(near, "forward_ms")
    return (
        "**The host.** The rows have the time that Python takes for a call beside the GPU's (`forward_host_ms`, "
        "`backward_host_ms`, means of ten calls, which vary two- to threefold from machine to machine, and from row "
        f"to row too). For p = 15 it is {ours[0]} ms a forward and {ours[1]} a backward, where FlashAttention-2's are "
        f"{theirs[0]} and {theirs[1]}; for powers that heads learn {learned[0]} and {learned[1]}. None of these rows "
        f"waits for it. Without the 1 a forward at D = 64, T = {SHORT} "
        f"takes the host {hundredths(host[0])} ms and the GPU {hundredths(gpu[0])}, and {hundredths(host[1])} and "
        f"{hundredths(gpu[1])} with powers that heads learn."
    )


def the_model(results: dict[str, Any]) -> str:
    models = dict.fromkeys((row["head_dim"], row["inputs"]) for row in results["rows"] if row["section"] == "trained")
    return (
        "Each head dimension has a model of its own, with rotary positions in every layer. "
        + " ".join(f"D = {head_dim}: {about}." for head_dim, about in models)
        + " Heads and sequences are repeated until there are as many as in the tables of random vectors."
    )


def on_its_inputs(results: dict[str, Any]) -> str:
    rows = results["rows"]
    ours, theirs = (changes(rows, contender) for contender in (OURS, BASELINE))
    holds(max(abs(x) for x in ours) < 10, "LSSAR takes about as long on a model's inputs as on random ones")
    every = of_training(rows, "trained")
    missed = [goal for goal in every if goal.met == "no"]
    limits = f"{number(len(every) - len(missed))} of the" if missed else "all"
    return (
        f"In milliseconds LSSAR with p = 15, forward and training step, takes {shares(ours)} of what it takes with "
        f"random vectors, and FlashAttention-2 {shares(theirs)}; the two are runs on two machines, which differ by as "
        f"much. Of the limits above, {limits} {number(len(every))} that are about training hold for these ratios too"
        + "".join(f"; {goal.name} misses its own {missed_by(goal, goal.most)}" for goal in missed)
        + "."
    )


def changes(rows: Sequence[Row], contender: str) -> list[float]:
    """By how many percent a contender's times on a model's inputs differ from those on random ones."""
    found = []
    for row in rows_of(rows, contender, "trained"):
        beside = rows_of(rows, contender, head_dim=row["head_dim"], length=row["length"])[0]
        found += [100 * (row[word] / beside[word] - 1) for word in ("forward_ms", "total_ms")]
    return found


def shares(percents: Sequence[float]) -> str:
    return f"{100 + min(percents):.0f} to {100 + max(percents):.0f}%"


def missed_by(goal: Goal, bound: float) -> str:
    """By how much, worst first, and where it is met."""
    missed = sorted((ratio, place) for place, ratio in goal.ratios if ratio > bound)[::-1]
    met = [f"at {place} it is met ({plain(ratio)})" for place, ratio in goal.ratios if ratio <= bound]
    words = listed(f"by {excess(ratio / bound - 1)} at {place} ({plain(ratio)})" for ratio, place in missed)
    return "; ".join([words, *met])


def excess(share: float) -> str:
    return f"{tenths(100 * share)}%" if share >= 0.0005 else "less than 0.1%"


def what_is_met(results: dict[str, Any]) -> str:
    every = goals(results["rows"])
    reached = [goal for goal in every if goal.met == "goal"]
    missed = [goal for goal in every if goal.met == "no"]
    names = f' ("goal": {", ".join(goal.name for goal in reached)})' if reached else ""
    limits = f"{number(len(every) - len(missed))} of the" if missed else "all"
    words = [f'{limits.capitalize()} {number(len(every))} limits ("at most") are met, and {number(len(reached))}']
    words.append(f"goal{'' if len(reached) == 1 else 's'}{names}.")
    words += [f"Missed is {goal.name}, {missed_by(goal, goal.most)}." for goal in missed]
    decoding = of_decoding(results["rows"])
    if decoding.met == "yes":
        words.append(f"Decoding misses its goal of {decoding.goal:g} {missed_by(decoding, decoding.goal)}.")
    narrow = [goal for goal in every if goal.most / (1 + RUNS_DIFFER) < max(goal.values) <= goal.most]
    if narrow:
        highest = listed(f"{goal.name} ({plain(max(goal.values))})" for goal in narrow)
        words.append(f"Within {100 * RUNS_DIFFER:.0f}% of its limit, and two machines differ by as much: {highest}.")
    return " ".join([*words, the_fastest(results["rows"])])


def the_fastest(rows: Sequence[Row]) -> str:
    best = rows_of(rows, FASTEST)
    for row in best:
        others = [x for x in rows if x["section"] == "train" and x["contender"] != FASTEST and "ratio" in x]
        beside = [x["ratio"] for x in others if (x["head_dim"], x["length"]) == (row["head_dim"], row["length"])]
        holds(row["ratio"] < min(beside), f"cuDNN is the fastest at D = {row['head_dim']}, T = {row['length']}")
    ratios = between(column(best, "ratio"), tenths)
    return f"cuDNN's kernels, which are the fastest of all, take {ratios} of FlashAttention-2's time."


def long_caches(rows: Sequence[Row]) -> str:
    """Times of a step over long caches of unit keys, to the fastest softmax's, in words."""
    cached = rows_of(rows, UNIT_KEYS, "decode", least=LONG_CACHE)
    ratios = column(cached, "forward_ratio")
    holds(max(ratios) < 1 + RUNS_DIFFER, "over long caches of unit keys a decode step takes no longer than softmax's")
    keys = listed(f"{row['length']:,}" for row in cached)
    return f"{each(ratios, hundredths)} times as long at {keys} keys"


def decoding(results: dict[str, Any]) -> str:
    rows = [row for row in results["rows"] if row["section"] == "decode"]
    raw = column(rows_of(rows, OURS, "decode", least=LONG_CACHE), "forward_ratio")
    return (
        "A step over a long cache of unit keys (`normalized_keys=True`) takes no longer than with the fastest SDPA "
        f"({long_caches(rows)}): it reads every key, but only the values that some head gives weight. Raw keys, whose "
        f"norms are computed anew at every step, take {between(raw, tenths)} times SDPA's time there. Short caches are "
        "bound by the three launches. A whole model beside its host: "
        "[huggingface.md](huggingface.md#speed-of-a-generated-token)."
    )
