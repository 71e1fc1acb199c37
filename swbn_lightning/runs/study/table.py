"""The table of a study: a line a network, setting and norm; means over the seeds, differences to BatchNorm."""

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import NamedTuple

from swbn_lightning.runs.intervals import (
    CONFIDENCE,
    Difference,
    Interval,
    corrected,
    difference,
    mean_interval,
)
from swbn_lightning.runs.study.observations import Observation

BASELINE = "bn"
_NONE = "–"


class Group(NamedTuple):
    """The observations of one line, seed by seed, and of BatchNorm in the norm's place (none, if it was not run)."""

    rows: list[Observation]
    baseline: list[Observation]
    seeds: int  # how many there should be


def markdown(rows: Sequence[Observation], seeds: int) -> str:
    """A heading and a table for each configuration. Columns in which nothing is known are left out.

    Args:
        rows: in the order in which lines should stand.
        seeds: how many trainings a line should have.
    """
    parts = []
    for config in dict.fromkeys(row.config for row in rows):
        own = [row for row in rows if row.config == config]
        parts.append(f"## {config}: {own[0].dataset}, {own[0].method}\n\n{_table(groups(own, seeds))}\n")
    return "\n".join(parts)


def groups(rows: Sequence[Observation], seeds: int) -> list[Group]:
    """The lines of one configuration's table: networks, settings, then norms, each in the order of the rows."""
    found: dict[tuple[str, str, str, str], list[Observation]] = {}
    for row in rows:
        found.setdefault((row.network, row.setting, row.metric, row.norm), []).append(row)
    places = {place: None for key in found for place in [key[:3]]}
    ordered = [key for place in places for key in found if key[:3] == place]
    return [Group(found[key], found.get((*key[:3], BASELINE), []), seeds) for key in ordered]


def difference_of(group: Group, confidence: float = CONFIDENCE) -> Difference:
    """The metric less BatchNorm's, of the seeds that both have; nothing for BatchNorm itself, or without such a seed.

    Over episodes only where all of these tests saved them and had the same.
    """
    base = {row.seed: row for row in group.baseline}
    pairs = [(row, base[row.seed]) for row in group.rows if row.seed in base and row.norm != BASELINE]
    sides = [[pair[side] for pair in pairs] for side in (0, 1)]
    sets = {(row.episode_set, len(row.episodes)) for pair in pairs for row in pair}
    shared = len(sets) == 1 and pairs[0][0].episodes
    own, other = ([row.episodes for row in side] for side in sides)
    values, baseline = ([row.value for row in side] for side in sides)
    return difference(values, baseline, (own, other) if shared else None, confidence)


def _table(lines: list[Group]) -> str:
    reach = next((group.rows[0] for group in lines if group.rows[0].reach is not None), None)
    decided = [difference_of(group).deciding for group in lines]
    count = sum(own is not None and own.half_width is not None for own in decided)
    goal = f"epochs to {100 * (reach.reach or 0):g} % ({reach.reach_split})" if reach else ""
    columns: list[tuple[str, str, Callable[[Group], str]]] = [
        ("network", "---", lambda group: f"`{group.rows[0].network}`"),
        ("setting", "---", _setting),
        ("norm", "---", lambda group: f"`{group.rows[0].norm}`"),
        ("seeds", "---:", _seeds),
        ("mean ± std over seeds, %", "---:", _accuracy),
        ("one test ± 95%", "---:", lambda group: _mean(group, "ci95", "± {:.2f}", 100)),
        ("paper, %", "---:", lambda group: _mean(group, "paper", "{:.2f}", 100)),
        ("to `bn`, 95% over seeds", "---:", lambda group: _difference(group, "over_seeds", count)),
        ("to `bn`, 95% over episodes", "---:", lambda group: _difference(group, "over_episodes", count)),
        ("to `bn`, 95% over both", "---:", lambda group: _difference(group, "over_both", count)),
        (goal, "---:", _epochs if goal else lambda group: _NONE),
        ("an epoch, s", "---:", lambda group: _mean(group, "epoch_seconds", "{:.3g}")),
        ("paper's epoch, s", "---:", lambda group: _mean(group, "paper_epoch_seconds", "{:.0f}")),
        ("fit, s", "---:", lambda group: _mean(group, "fit_seconds", "{:.0f}")),
        ("whiteness distance, start → end", "---:", lambda group: _course(group, "distance", "{:.2f}")),
        ("RMS correlation, start → end", "---:", lambda group: _course(group, "rms", "{:.3f}")),
    ]
    cells = [(title, align, [text(group) for group in lines]) for title, align, text in columns]
    shown = [column for column in cells if any(cell != _NONE for cell in column[2])]
    table = [[title for title, _, _ in shown], [align for _, align, _ in shown]]
    table += [[column[2][number] for column in shown] for number in range(len(lines))]
    return "\n".join([*(f"| {' | '.join(line)} |" for line in table), *_note(count)])


def _note(count: int) -> list[str]:
    """What bold means, below a table that compares."""
    if not count:
        return []
    bold = "Bold: the interval leaves out zero; of seeds that share their episodes the one over both decides."
    if count > 1:
        bold += (
            f" {count} comparisons in one table: where nothing differs, {100 * (1 - CONFIDENCE):.0f} % of them are "
            f"expected to be bold. Those with † leave out zero at {100 * corrected(count):.2f} % too (Bonferroni)."
        )
    return ["", bold]


def _setting(group: Group) -> str:
    row = group.rows[0]
    words = [row.setting, row.metric if row.metric != "accuracy" else ""]
    return " ".join(word for word in words if word) or _NONE


def _seeds(group: Group) -> str:
    count = len(group.rows)
    return f"{count}" if count == group.seeds else f"{count} of {group.seeds}"


def _accuracy(group: Group) -> str:
    found = mean_interval([100 * row.value for row in group.rows])
    return f"{found.mean:.2f}" + (f" ± {found.std:.2f}" if found.std is not None else "")


def _difference(group: Group, name: str, comparisons: int) -> str:
    """In points; bold where the interval that decides leaves out zero, † where it does as one of ``comparisons``."""
    every = difference_of(group)
    found: Interval | None = getattr(every, name)
    if found is None:
        return _NONE
    if found.half_width is None:
        return f"{100 * found.mean:+.2f}"
    text = f"{100 * found.mean:+.2f} ± {100 * found.half_width:.2f}"
    if found is not every.deciding or not found.leaves_out_zero:
        return text
    wide = difference_of(group, corrected(comparisons)).deciding if comparisons > 1 else None
    return f"**{text}**" + (" †" if wide is not None and wide.leaves_out_zero else "")


def _epochs(group: Group) -> str:
    known = [row.epochs_to_reach for row in group.rows if row.epochs_to_reach is not None]
    if not known:
        return "not reached"
    missing = f" ({len(known)} of {len(group.rows)})" if len(known) < len(group.rows) else ""
    return f"{fmean(known):.{0 if len(group.rows) == 1 else 1}f}{missing}"


def _known(group: Group, name: str) -> list[float]:
    return [value for row in group.rows if (value := getattr(row, name)) is not None]


def _mean(group: Group, name: str, form: str, times: float = 1) -> str:
    known = _known(group, name)
    return form.format(times * fmean(known)) if known else _NONE


def _course(group: Group, name: str, form: str) -> str:
    ends = [_mean(group, f"{name}_{end}", form) for end in ("start", "end")]
    return " → ".join(ends) if _NONE not in ends else _NONE
