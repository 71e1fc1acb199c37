"""The table of a study: a line a network, setting and norm; means over the seeds, differences to BatchNorm."""

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import NamedTuple

from benchmarks.study.observations import Observation
from swbn_lightning.intervals import Interval, mean_interval, paired_difference

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


def difference_over_seeds(group: Group) -> Interval | None:
    """The metric less BatchNorm's, paired seed by seed; None for BatchNorm itself, or without a common seed."""
    pairs = _pairs(group)
    return paired_difference([row.value for row, _ in pairs], [base.value for _, base in pairs]) if pairs else None


def difference_over_episodes(group: Group) -> Interval | None:
    """The accuracy less BatchNorm's, paired over the same test episodes; of several seeds an episode's mean.

    None where a test did not save its episodes, or had others.
    """
    pairs = _pairs(group)
    sets = {(side.episode_set, len(side.episodes)) for pair in pairs for side in pair}
    if len(sets) != 1 or not pairs[0][0].episodes:
        return None
    norm, base = (
        [fmean(values) for values in zip(*(pair[side].episodes for pair in pairs), strict=True)] for side in (0, 1)
    )
    return paired_difference(norm, base)


def _pairs(group: Group) -> list[tuple[Observation, Observation]]:
    if not group.rows or group.rows[0].norm == BASELINE:
        return []
    base = {row.seed: row for row in group.baseline}
    return [(row, base[row.seed]) for row in group.rows if row.seed in base]


def _table(lines: list[Group]) -> str:
    reach = next((group.rows[0] for group in lines if group.rows[0].reach is not None), None)
    goal = f"epochs to {100 * (reach.reach or 0):g} % ({reach.reach_split})" if reach else ""
    columns: list[tuple[str, str, Callable[[Group], str]]] = [
        ("network", "---", lambda group: f"`{group.rows[0].network}`"),
        ("setting", "---", _setting),
        ("norm", "---", lambda group: f"`{group.rows[0].norm}`"),
        ("seeds", "---:", _seeds),
        ("mean ± std over seeds, %", "---:", _accuracy),
        ("one test ± 95%", "---:", lambda group: _mean(group, "ci95", "± {:.2f}", 100)),
        ("paper, %", "---:", lambda group: _mean(group, "paper", "{:.2f}", 100)),
        ("to `bn`, 95% over seeds", "---:", lambda group: _difference(difference_over_seeds(group))),
        ("to `bn`, 95% over episodes", "---:", lambda group: _difference(difference_over_episodes(group))),
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
    return "\n".join(f"| {' | '.join(line)} |" for line in table)


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


def _difference(found: Interval | None) -> str:
    """In points; bold where the interval leaves out zero."""
    if found is None:
        return _NONE
    if found.half_width is None:
        return f"{100 * found.mean:+.2f}"
    text = f"{100 * found.mean:+.2f} ± {100 * found.half_width:.2f}"
    return f"**{text}**" if abs(found.mean) > found.half_width else text


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
