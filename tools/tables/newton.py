"""Tables of docs/newton.md, from the results of `softplus-attention newton`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tools.tables.markdown import TableError, read_results, table

LAW = "m1 m2 / r^2"
EXPONENTS = ("m1", "m2", "r")
ENGINES = ("operon", "enumerator")
Found = dict[str, Any]


def mean(values: Iterable[float], form: str) -> str:
    found = list(values)
    return f"{statistics.fmean(found):{form}}" if found else "-"


def mean_and_range(values: Iterable[float], form: str) -> str:
    found = list(values)
    ends = f" ({min(found):{form}} to {max(found):{form}})" if len(found) > 1 else ""
    return mean(found, form) + ends


def groups(cells: Iterable[Found]) -> dict[tuple[int, bool, str], list[Found]]:
    """Cells grouped by number of labels (most first), pre-training and arm."""
    cells = list(cells)
    arms = list(dict.fromkeys(cell["arm"] for cell in cells))
    keys = {(cell["labels"], cell["pretrained"], cell["arm"]) for cell in cells}
    ordered = sorted(keys, key=lambda key: (-key[0], not key[1], arms.index(key[2])))
    return {
        key: [cell for cell in cells if (cell["labels"], cell["pretrained"], cell["arm"]) == key] for key in ordered
    }


def format_arm(arm: str, pretrained: bool) -> str:
    return f"`{arm}`" + ("" if pretrained else ", no pre-training")


def laws_found(cells: Sequence[Found], scale: str, engine: str, rule: str = "within") -> str:
    """How many samples of the cells have Newton's law, such as "3 of 3"."""
    samples = [sample for cell in cells for sample in cell.get("laws", {}).get(scale, [])]
    chosen = [sample[engine]["chosen"][rule]["law"] for sample in samples if engine in sample]
    return f"{chosen.count(LAW)} of {len(chosen)}" if chosen else "-"


def force_table(found: Found) -> str:
    made = groups(found["cells"])
    inside = {key: [cell["tune"]["quality"]["inside"] for cell in cells] for key, cells in made.items()}
    beyond = {
        name: {key: [cell["quality"][name] for cell in cells if "quality" in cell] for key, cells in made.items()}
        for name in ("heavier", "wider")
    }
    columns = [
        [format_arm(arm, pretrained) for _, pretrained, arm in made],
        [f"{labels:,}" for labels, _, _ in made],
        [mean_and_range((q["r2_ln_force"] for q in inside[key]), ".3f") for key in made],
    ]
    for name in EXPONENTS:
        fitted = [[cell["exponents"]["inside"]["exponents"][name] for cell in made[key]] for key in made]
        columns.append([mean_and_range(values, ".2f") for values in fitted])
    columns.append([mean((q["r2_force"] for q in inside[key]), ".3f") for key in made])
    columns.append(
        [" / ".join(mean((q["r2_ln_force"] for q in own[key]), ".2f") for own in beyond.values()) for key in made]
    )
    columns.append(
        [
            f"{laws_found(cells, 'ln_force', 'operon')}, {laws_found(cells, 'ln_force', 'enumerator')}"
            for cells in made.values()
        ]
    )
    head = ["arm", "labelled systems", "R^2 of ln F", *(f"exponent of {name}" for name in EXPONENTS), "R^2 of F"]
    head += ["R^2 of ln F, heavier / wider", f"law {LAW}: pyoperon, enumerator"]
    return table(head, columns)


def controls_table(found: Found) -> str:
    """The same regression on the true force, on the true force with each model's noise, and on the predicted force."""
    rows = [("true F", list(found["controls"].values()))]
    counts = sorted({cell["labels"] for cell in found["cells"]}, reverse=True)
    for labels in counts:
        cells = [cell for cell in found["cells"] if cell["labels"] == labels]
        noisy = [cell["control_with_noise"] for cell in cells if "control_with_noise" in cell]
        rows.append((f"true F with the noise of each model of {labels:,} labelled systems", noisy))
        rows.append((f"predictions of the models of {labels:,} labelled systems", cells))
    noises = [[cell["noise"] for cell in cells if "noise" in cell] for _, cells in rows]
    ends = [dict.fromkeys(f"{end:.2f}" for end in (min(noise), max(noise))) if noise else "-" for noise in noises]
    columns = [[name for name, _ in rows], [" to ".join(pair) for pair in ends]]
    columns += [[laws_found(cells, "ln_force", "operon", rule) for _, cells in rows] for rule in ("within", "score")]
    return table(["regression on", "spread of ln F", f"{LAW} by the rule within", "by the rule score"], columns)


def by_arm(runs: Iterable[Found]) -> dict[str, list[Found]]:
    made: dict[str, list[Found]] = {}
    for run in runs:
        made.setdefault(run["arm"], []).append(run)
    return made


def at(rows: Iterable[Found], multiple: int, name: str) -> list[float]:
    return [row[name] for row in rows if row["multiple"] == multiple]


def length_table(found: Found) -> str:
    arms, multiples = by_arm(found["long"]), found["experiment"]["multiples"]
    head = ["mean over seeds (lowest to highest)", *(f"{multiple}x" for multiple in multiples)]

    def rows(title: str, of_run: Callable[[Found], Iterable[Found]], name: str, form: str) -> list[list[str]]:
        return [
            [f"{title}: `{arm}`"]
            + [
                mean_and_range([value for run in runs for value in at(of_run(run), multiple, name)], form)
                for multiple in multiples
            ]
            for arm, runs in arms.items()
        ]

    def force(kind: str) -> Callable[[Found], Iterable[Found]]:
        return lambda run: next((rows for name, rows in run["force"].items() if name.startswith(kind)), [])

    made = rows("error of the next position, AU", lambda run: run["next_place"], "error", ".3f")
    made += rows("roll-out, distance from the ellipse", lambda run: run["roll_out"], "median_ellipse_error", ".2g")
    made += rows("R^2 of the force", force("tuned"), "r2", ".2f")
    made += rows("R^2 of the force, no pre-training", force("untrained"), "r2", ".2f")
    return table(head, list(zip(*made, strict=True)))


def probes_table(found: Found) -> str:
    """R^2 of each target at its best layer, averaged over seeds."""
    arms = by_arm(found["probes"])
    targets = list(found["probes"][0]["r2"])
    columns = [[f"`{arm}`" for arm in arms]]
    for target in targets:
        cells = []
        for runs in arms.values():
            layers = [statistics.fmean(values) for values in zip(*(run["r2"][target] for run in runs), strict=True)]
            best = max(range(len(layers)), key=lambda layer: layers[layer])
            cells.append(f"{layers[best]:.3f} ({best})")
        columns.append(cells)
    return table(["R^2 at the best layer (which)", *targets], columns)


def faithful_table(found: Found) -> str:
    """The preset "faithful": raw F, whose predictions may be negative; laws of several samples of points."""
    losses = {run["arm"]: run["loss"] for run in found["pretraining"]}
    rows = []
    for (_, pretrained, arm), cells in groups(found["cells"]).items():
        inside = [cell["quality"]["inside"] for cell in cells]
        fitted = [cell["exponents"]["inside"]["exponents"] for cell in cells]
        rows.append(
            [
                format_arm(arm, pretrained),
                f"{losses[arm]:.2f}" if pretrained else "-",
                mean_and_range((q["r2_force"] for q in inside), ".2f"),
                mean_and_range((q["r2_ln_force"] for q in inside), ".2f"),
                mean_and_range((100 * q["not_positive"] / q["points"] for q in inside), ".0f"),
                *(mean_and_range((exponents[name] for exponents in fitted), ".2f") for name in EXPONENTS),
                *(laws_found(cells, "force", engine, "score") for engine in ENGINES),
            ]
        )
    truth = [laws_found(list(found["controls"].values()), "force", engine, "score") for engine in ENGINES]
    rows.append(["true F", *["-"] * (len(rows[0]) - 1 - len(truth)), *truth])
    head = ["arm", "loss of pre-training", "R^2 of F", "R^2 of ln F", "F predicted as 0 or less, %"]
    head += [*(f"exponent of {name}" for name in EXPONENTS), f"law {LAW}: pyoperon", "enumerator"]
    return table(head, list(zip(*rows, strict=True)))


KINDS: dict[str, Callable[[Found], str]] = {
    "force": force_table,
    "controls": controls_table,
    "length": length_table,
    "probes": probes_table,
}
FILES: dict[str, dict[str, Callable[[Found], str]]] = {
    "cpu": KINDS,
    "h200": KINDS,
    "faithful-h200": {"force": faithful_table},
}


def make_tables(results: Path) -> dict[str, str]:
    made: dict[str, str] = {}
    for name, kinds in FILES.items():
        path = results / "newton" / f"{name}.json"
        found = read_results(path, "softplus-attention newton")
        try:
            made |= {f"{name}-{kind}": write(found) for kind, write in kinds.items()}
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise TableError(f"{path} is not the results.json of softplus-attention newton: {error!r}") from error
    return made
