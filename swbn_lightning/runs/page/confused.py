"""Which classes a test took for which, as a picture or as tables."""

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure

from swbn_lightning.files.pictures import new_figure, plain_text
from swbn_lightning.files.reading import has_file
from swbn_lightning.runs.confusion import SavedConfusion, read_confusion
from swbn_lightning.runs.folders import CONFUSION_FILE
from swbn_lightning.runs.page.groups import Line, newest_tests, setting_names
from swbn_lightning.runs.page.render import (
    MOST_PICTURED,
    Name,
    Number,
    Part,
    details,
    heading,
    left_out,
    number,
    picture,
    table,
    text,
)

MOST_DRAWN = 30  # classes in a picture, of which the names can still be read
_MOST_PRINTED = 12  # classes, of which the picture has numbers too
_MOST_PAIRS, _MOST_CLASSES = 20, 200  # lines of the tables
_LONGEST = 18  # letters of a name in the picture
_DARK = 0.35  # a share on whose colour black letters cannot be read


def confusion(lines: Sequence[Line]) -> list[Part]:
    """The newest tests of each training: a picture, or the pairs with most mistakes if there are many classes."""
    names = setting_names(lines)
    tests = [
        (f"{line.label}: {setting}" if len(lines) > 1 else setting, test.run)
        for line in lines
        for setting, test in newest_tests([line], names)
        if has_file(test.run.folder, (CONFUSION_FILE,))
    ]
    if not tests:
        return []
    words = (
        "The share of each class (row) that was given each class (column); of few-shot tests the share of the class's "
        "queries in episodes that had both. Numbers are per cent, and what never occurred is blank. Counts are in "
        "confusion.csv in a test's folder."
    )
    made = [text(words), *map(text, left_out(len(tests), MOST_PICTURED, "tests"))]
    for title, run in tests[:MOST_PICTURED]:
        found = run.try_to_read(CONFUSION_FILE, lambda path: read_confusion(path.parent))
        if found is None:
            continue
        many = len(found.classes) > MOST_DRAWN
        drawn = [] if many else [picture(heatmap(found), f"Confusion of classes: {title}", wide=True)]
        made += [heading(title, level=3), *(most_confused(found) if many else drawn), class_accuracies(found)]
    return made


def heatmap(found: SavedConfusion) -> Figure:
    """Draw the share of each class (row) that was given each class (column); what did not occur is blank."""
    places = {label: place for place, label in enumerate(found.classes)}
    share = np.full((len(places), len(places)), math.nan)
    for pair in found.pairs:
        share[places[pair.label], places[pair.predicted]] = pair.times / pair.of
    side = max(2.6, 0.26 * len(places))
    figure = new_figure(side + 2.4, side + 1.4)
    axes = figure.subplots()
    # By the root of the share: mistakes are few beside right answers, and must be seen. Rare ones are pale.
    image = axes.imshow(share, cmap="Blues", norm=PowerNorm(0.5, 0, 1), interpolation="nearest")
    names = [plain_text(own.name, _LONGEST) for own in found.classes.values()]
    axes.set_xticks(range(len(names)), names, rotation=90, fontsize=7)
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.set_xlabel("predicted class", fontsize=9)
    axes.set_ylabel("class", fontsize=9)
    for (row, column), value in np.ndenumerate(share) if len(names) <= _MOST_PRINTED else ():
        if not math.isnan(value):
            colour = "white" if value > _DARK else "black"
            axes.text(column, row, f"{100 * value:.0f}", ha="center", va="center", fontsize=7, color=colour)
    bar = figure.colorbar(image, ax=axes, shrink=0.9, aspect=30)
    bar.set_label("share of the class", fontsize=9)
    bar.ax.tick_params(labelsize=7)
    return figure


def most_confused(found: SavedConfusion) -> list[Part]:
    """The pairs of classes with most mistakes, in a table."""
    wrong = sorted((pair for pair in found.pairs if pair.label != pair.predicted), key=lambda pair: -pair.times)
    if not wrong:
        return [text("No mistake.")]
    rows = [
        [
            Name(found.classes[pair.label].name),
            Name(found.classes[pair.predicted].name),
            Number(f"{pair.times:,} of {pair.of:,}"),
            number(pair.times / pair.of, "{:.2f}", 100),
        ]
        for pair in wrong[:_MOST_PAIRS]
    ]
    made = [table(["class", "predicted as", "how often", "%"], rows)]
    return [*made, *map(text, left_out(len(wrong), _MOST_PAIRS, "pairs of classes that were confused"))]


def class_accuracies(found: SavedConfusion) -> Part:
    """Each class's accuracy, the lowest first, folded."""
    known = sorted(found.classes.values(), key=lambda own: math.inf if own.accuracy is None else own.accuracy)
    rows = [[Name(own.name), number(own.accuracy, "{:.2f}", 100)] for own in known[:_MOST_CLASSES]]
    parts = [table(["class", "accuracy, %"], rows), *map(text, left_out(len(known), _MOST_CLASSES, "classes"))]
    return details("Accuracy of every class, the lowest first", parts)
