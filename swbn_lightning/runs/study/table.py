"""The table of a study: a line a network, setting and norm; means over the seeds, differences to BatchNorm."""

from collections.abc import Callable
from typing import NamedTuple

import pandas as pd

from swbn_lightning.runs.intervals import CONFIDENCE, Difference, Interval, corrected, difference, mean_interval

BASELINE = "bn"
_NONE = "–"


class Line(NamedTuple):
    """One line's observations, seed by seed, and BatchNorm's in its place (none, if it was not run)."""

    rows: pd.DataFrame
    baseline: pd.DataFrame

    def first(self, name: str) -> str:
        """A column that is the same in all rows."""
        return str(self.rows[name].iloc[0])


def markdown(observed: pd.DataFrame, seeds: int) -> str:
    """A heading and a table for each configuration; ``seeds`` is how many trainings a line should have."""
    parts = []
    for config, own in observed.groupby("config", sort=False):
        title = f"{config}: {own.dataset.iloc[0]}, {own.method.iloc[0]}"
        parts.append(f"## {title}\n\n{_table(lines_of(own), seeds)}\n")
    return "\n".join(parts)


def lines_of(observed: pd.DataFrame) -> list[Line]:
    """The lines of one configuration's table: networks, settings, then norms, each in the order of the rows."""
    places = [place for _, place in observed.groupby(["network", "setting", "metric"], sort=False)]
    return [
        Line(own, place[place.norm == BASELINE]) for place in places for _, own in place.groupby("norm", sort=False)
    ]


def difference_of(line: Line, confidence: float = CONFIDENCE) -> Difference:
    """The metric less BatchNorm's, of the seeds that both have; nothing for BatchNorm itself, or without such a seed.

    Over episodes (of classification: images) only where all of these tests saved them and had the same.
    """
    if line.first("norm") == BASELINE:
        return Difference(None, None, None)
    pairs = line.rows.merge(line.baseline, on="seed", suffixes=("", "_base"))
    sides = [(pairs[f"episodes{side}"], pairs[f"episode_set{side}"]) for side in ("", "_base")]
    sets = {(which, len(own)) for episodes, names in sides for own, which in zip(episodes, names, strict=True)}
    shared = len(sets) == 1 and len(pairs.episodes[0]) > 0
    episodes = (sides[0][0].tolist(), sides[1][0].tolist()) if shared else None
    return difference(pairs.value.tolist(), pairs.value_base.tolist(), episodes, confidence)


def _table(lines: list[Line], seeds: int) -> str:
    decided = [difference_of(line).deciding for line in lines]
    count = sum(own is not None and own.half_width is not None for own in decided)
    first = lines[0].rows.iloc[0]
    units = "episodes" if first.setting else "images"
    goal = "" if pd.isna(first.reach) else f"epochs to {100 * first.reach:g} % ({first.reach_split})"
    columns: list[tuple[str, Callable[[Line], str]]] = [
        ("network", lambda line: f"`{line.first('network')}`"),
        ("setting", _setting),
        ("norm", lambda line: f"`{line.first('norm')}`"),
        ("seeds", lambda line: f"{len(line.rows)}" + (f" of {seeds}" if len(line.rows) != seeds else "")),
        ("mean ± std over seeds, %", _accuracy),
        ("one test ± 95%", lambda line: _mean(line, "ci95", "± {:.2f}", 100)),
        ("paper, %", lambda line: _mean(line, "paper", "{:.2f}", 100)),
        ("to `bn`, 95% over seeds", lambda line: _difference(line, "over_seeds", count)),
        (f"to `bn`, 95% over {units}", lambda line: _difference(line, "over_episodes", count)),
        ("to `bn`, 95% over both", lambda line: _difference(line, "over_both", count)),
        (goal, _epochs if goal else lambda line: _NONE),
        ("an epoch, s", lambda line: _mean(line, "epoch_seconds", "{:.3g}")),
        ("fit, s", lambda line: _mean(line, "fit_seconds", "{:.0f}")),
        ("whiteness distance, start → end", lambda line: _course(line, "distance", "{:.2f}")),
        ("RMS correlation, start → end", lambda line: _course(line, "rms", "{:.3f}")),
    ]
    cells = {title: [text(line) for line in lines] for title, text in columns}
    shown = {title: own for title, own in cells.items() if any(cell != _NONE for cell in own)}
    left = ("network", "setting", "norm")
    rows = [[*shown], ["---" if title in left else "---:" for title in shown], *zip(*shown.values(), strict=True)]
    return "\n".join([*(f"| {' | '.join(row)} |" for row in rows), *_note(count, units)])


def _note(count: int, units: str) -> list[str]:
    """What bold means, below a table that compares."""
    if not count:
        return []
    bold = f"Bold: the interval leaves out zero; of seeds that share their {units} the one over both decides."
    if count > 1:
        bold += (
            f" {count} comparisons in one table: where nothing differs, {100 * (1 - CONFIDENCE):.0f} % of them are "
            f"expected to be bold. Those with † leave out zero at {100 * corrected(count):.2f} % too (Bonferroni)."
        )
    return ["", bold]


def _setting(line: Line) -> str:
    metric = line.first("metric")
    return " ".join(word for word in (line.first("setting"), metric if metric != "accuracy" else "") if word) or _NONE


def _accuracy(line: Line) -> str:
    found = mean_interval((100 * line.rows.value).tolist())
    return f"{found.mean:.2f}" + (f" ± {found.std:.2f}" if found.std is not None else "")


def _difference(line: Line, name: str, comparisons: int) -> str:
    """In points; bold where the interval that decides leaves out zero, † where it does as one of ``comparisons``."""
    every = difference_of(line)
    found: Interval | None = getattr(every, name)
    if found is None:
        return _NONE
    if found.half_width is None:
        return f"{100 * found.mean:+.2f}"
    text = f"{100 * found.mean:+.2f} ± {100 * found.half_width:.2f}"
    if found is not every.deciding or not found.leaves_out_zero:
        return text
    wide = difference_of(line, corrected(comparisons)).deciding if comparisons > 1 else None
    return f"**{text}**" + (" †" if wide is not None and wide.leaves_out_zero else "")


def _epochs(line: Line) -> str:
    known = line.rows.epochs_to_reach.dropna().astype(float)
    if known.empty:
        return "not reached"
    missing = f" ({len(known)} of {len(line.rows)})" if len(known) < len(line.rows) else ""
    return f"{known.mean():.{0 if len(line.rows) == 1 else 1}f}{missing}"


def _mean(line: Line, name: str, form: str, times: float = 1) -> str:
    known = line.rows[name].dropna().astype(float)
    return _NONE if known.empty else form.format(times * known.mean())


def _course(line: Line, name: str, form: str) -> str:
    ends = [_mean(line, f"{name}_{end}", form) for end in ("start", "end")]
    return " → ".join(ends) if _NONE not in ends else _NONE
