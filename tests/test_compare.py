"""Comparisons of runs on the same episodes: against numpy, and what cannot be compared."""

import csv
from pathlib import Path

import numpy as np
import pytest

from cli import main
from swbn_lightning.errors import InputError
from swbn_lightning.runs.compare import compare
from tests.made_runs import change, identify, make_image_test, make_test, told

T_29, T_1 = 2.045229642, 12.706204736  # Student's t at 97.5%, 29 and 1 degrees of freedom


def saved(root, name, accuracies, seed=0, version=1, **changed):
    """A trained run (version_0) with a test of it, as the command leaves them."""
    run = Path(root) / name
    norm = changed.pop("norm", name)
    if not (run / "version_0" / "run.json").exists():
        identify(run / "version_0", "fit", {"seed_everything": seed, "run.name": str(name), "model.norm": norm})
    row = {"accuracy": float(np.mean(accuracies)), **changed}
    make_test(run / f"version_{version}", run / "version_0", episodes=accuracies, **row)
    return str(run)


def classified(root, name, predicted, labels, seed=0, version=1, **changed):
    """A classifier's run with a test of it."""
    run = Path(root) / name
    norm = changed.pop("norm", name)
    if not (run / "version_0" / "run.json").exists():
        identify(run / "version_0", "fit", {"seed_everything": seed, "run.name": str(name), "model.norm": norm})
    make_image_test(run / f"version_{version}", run / "version_0", labels, predicted, list("abcd"), **changed)
    return str(run)


def guesses(labels, share, seed):
    """Classes that are right of so many of the images."""
    rng = np.random.default_rng(seed)
    return np.where(rng.random(len(labels)) < share, labels, (labels + 1 + rng.integers(0, 3, len(labels))) % 4)


def episodes(seed, number=30):
    return np.random.default_rng(seed).integers(20, 76, number) / 75


def test_two_runs_are_paired_by_episode(tmp_path):
    luck = np.random.default_rng(9).normal(0, 0.1, 30)
    a, b = 0.5 + luck, 0.52 + luck + np.random.default_rng(8).normal(0, 0.01, 30)
    longer = np.append(b, 0.5)  # compared on what both have
    first, second = compare([saved(tmp_path, "bn", a), f"ours={saved(tmp_path, 'swbn', longer)}"])
    assert (first.label, second.label) == (str(tmp_path / "bn"), "ours") and first.tested == second.tested == 30
    assert first.difference is None and first.distinguishable is None
    assert second.accuracy.mean == pytest.approx(b.mean(), abs=1e-12)
    assert second.accuracy.half_width == pytest.approx(T_29 * b.std(ddof=1) / np.sqrt(30), rel=1e-6)
    assert second.difference.over_episodes.mean == pytest.approx((b - a).mean(), abs=1e-12)
    half = T_29 * (b - a).std(ddof=1) / np.sqrt(30)
    assert second.difference.over_episodes.half_width == pytest.approx(half, rel=1e-6)
    assert second.distinguishable and half < second.accuracy.half_width / 5  # what unpaired intervals hide
    (_, same) = compare([str(tmp_path / "bn"), f"again={saved(tmp_path, 'other', a[::-1])}"])
    assert same.distinguishable is False


def test_seeds_of_a_run_lie_under_one_path(tmp_path):
    values = {(norm, seed): episodes(10 * seed + len(norm)) for norm in ("bn", "swbn") for seed in (0, 3)}
    for (norm, seed), accuracies in values.items():
        saved(tmp_path / norm, f"seed{seed}", accuracies, seed=seed, norm=norm)
    first, second = compare([str(tmp_path / "bn"), str(tmp_path / "swbn")])
    assert first.seeds == second.seeds == (0, 3)
    means = np.array([values["swbn", seed].mean() for seed in (0, 3)])
    assert second.accuracy.half_width == pytest.approx(T_1 * means.std(ddof=1) / np.sqrt(2), rel=1e-6)
    by_seed = means - [values["bn", seed].mean() for seed in (0, 3)]
    found = second.difference
    assert found.over_seeds.mean == pytest.approx(by_seed.mean(), abs=1e-12)
    assert found.over_seeds.half_width == pytest.approx(T_1 * by_seed.std(ddof=1) / np.sqrt(2), rel=1e-6)
    assert found.deciding is found.over_both
    assert found.over_both.half_width > max(found.over_seeds.half_width, found.over_episodes.half_width)
    difference = sum(values["swbn", seed] - values["bn", seed] for seed in (0, 3)) / 2
    half = T_29 * difference.std(ddof=1) / np.sqrt(30)
    assert found.over_episodes.half_width == pytest.approx(half, rel=1e-6)


def test_heads_chosen_for_the_test(tmp_path):
    """One each: the heads are compared. Several: each with itself; under one path they are never taken for one."""
    bn = saved(tmp_path, "bn", episodes(0), head="ridge")
    swbn = saved(tmp_path, "swbn", episodes(1), head="nearest-centroid")
    (first, second) = compare([bn, swbn])
    assert first.setting == "test, 5-way 1-shot, 15 queries, seed 0" and second.difference is not None
    saved(tmp_path, "swbn", episodes(2), head="ridge", version=2)
    (first, second) = compare([bn, swbn])
    assert first.setting.endswith("seed 0, ridge") and second.accuracy.mean == pytest.approx(episodes(2).mean())
    saved(tmp_path, "gn", episodes(3), head="soft-kmeans")
    with pytest.raises(
        InputError, match=r"no test in common \(.*seed 0, nearest-centroid, .*seed 0, ridge; .*soft-kmean"
    ):
        compare([swbn, str(tmp_path / "gn")])


def test_the_shared_seeds_are_paired(tmp_path):
    values = {seed: episodes(seed) / 2 for seed in (0, 1, 2)}
    for norm, seeds in {"a": (0, 1), "b": (1, 2), "c": (7,)}.items():
        for seed in seeds:
            own = values[0] if norm == "c" else values[seed] + 0.1 * seed * (norm == "b")
            saved(tmp_path / norm, f"seed{seed}", own, seed=seed, norm=norm)
    _, second = compare([str(tmp_path / "a"), str(tmp_path / "b")])
    assert second.seeds == (1, 2) and second.paired_seeds == (1,)
    found = second.difference
    assert found.over_seeds.mean == pytest.approx(0.1) and found.over_seeds.half_width is None  # of one seed
    assert found.over_episodes.mean == pytest.approx(0.1)
    _, third = compare([str(tmp_path / "a"), str(tmp_path / "c")])
    assert third.difference.over_seeds is None  # none in common: all of each side
    expected = (values[0] - (values[0] + values[1]) / 2).mean()
    assert third.difference.over_episodes.mean == pytest.approx(expected)


def test_it_is_said_which_seeds_a_difference_is_of(tmp_path, capsys):
    for name, seeds in {"a": (0, 1, 2), "b": (0, 2), "c": (1,), "d": (1,)}.items():
        for seed in seeds:
            saved(tmp_path / name, f"seed{seed}", episodes(seed + ord(name)), seed=seed, norm=name)
    runs = [f"{name}={tmp_path / name}" for name in "abcd"]
    main(["compare", *runs[:2], "--output", str(tmp_path / "x.csv")])
    said = capsys.readouterr().out
    assert "The difference of b is of the seeds that a has, too: 0, 2. Accuracies are of all" in said
    rows = list(csv.DictReader((tmp_path / "x.csv").open()))
    assert "Of one training seed" not in said and [row["paired_seeds"] for row in rows] == ["", "0 2"]
    main(["compare", *runs[2:]])
    assert "Of one training seed the interval is over episodes" in capsys.readouterr().out


def test_every_shared_setting_has_a_table_and_the_newest_test_counts(tmp_path, capsys):
    for name in ("a", "b"):
        saved(tmp_path, name, episodes(1), version=1)
        saved(tmp_path, name, episodes(2), version=2, shots=5)
    newer = saved(tmp_path, "b", episodes(3), version=3)
    output = tmp_path / "new" / "folder" / "x.csv"
    main(["compare", f"a[b]={tmp_path / 'a'}", f"[red]:cat:[/]={newer}", "--output", str(output)])
    printed = capsys.readouterr().out
    assert "a[b]" in printed and "[red]:cat:[/]" in printed  # as they were given, no markup
    assert "5-way 1-shot" in printed and "5-way 5-shot" in printed
    rows = list(csv.DictReader(output.open()))
    assert [row["setting"].split(",")[1] for row in rows] == [" 5-way 1-shot"] * 2 + [" 5-way 5-shot"] * 2
    difference = episodes(3) - episodes(1)
    half = T_29 * difference.std(ddof=1) / np.sqrt(30)
    for name, value in (("", difference.mean()), ("_std", difference.std(ddof=1)), ("_ci95", half)):
        assert float(rows[1][f"difference_over_episodes{name}"]) == pytest.approx(value, rel=1e-6)
    assert f"{100 * difference.mean():+.2f} ± {100 * half:.2f}" in printed
    assert rows[1]["distinguishable"] == str(abs(difference.mean()) > half)
    with pytest.raises(SystemExit) as stopped:
        main(["compare", str(tmp_path / "a"), newer, "--output", str(tmp_path / "new")])
    printed = capsys.readouterr()
    assert stopped.value.code == 2 and "is a folder; give the file for the table" in printed.err
    assert not printed.out  # before the work


def test_what_cannot_be_compared(tmp_path, capsys):
    a = saved(tmp_path, "a", episodes(1))
    saved(tmp_path, "other", episodes(2), episodes_id="different")
    saved(tmp_path, "shots", episodes(2), shots=5)
    saved(tmp_path / "mixed", "x", episodes(1), seed=0, norm="bn")
    saved(tmp_path / "mixed", "y", episodes(1), seed=1, norm="swbn-fro")
    saved(tmp_path / "renewed", "old", episodes(1), norm="bn")
    saved(tmp_path / "renewed", "new", episodes(1), norm="swbn-fro")  # the same seed: not its newer test
    identify(tmp_path / "untested" / "version_0")
    saved(tmp_path, "short", episodes(1))
    (tmp_path / "short" / "version_1" / "episodes.csv").write_text("episode,accuracy\n0,0.5\n")
    cases = [
        ([a], "at least two"),
        ([a, a], "labels of their own"),
        ([a, f"b={tmp_path / 'nothing'}"], "does not exist"),
        ([a, str(tmp_path / "untested")], "holds no test (runs: 1, none with episodes.csv or images.csv)"),
        ([a, str(tmp_path / "other")], "tested on other episodes"),
        ([a, str(tmp_path / "shots")], "no test in common"),
        ([a, str(tmp_path / "mixed")], "model.norm: 'bn' and 'swbn-fro'"),
        ([a, str(tmp_path / "renewed")], "model.norm: 'swbn-fro' and 'bn'"),
        ([a, str(tmp_path / "short")], "holds 1 episodes, results.json says 30"),
    ]
    for words, message in cases:
        with pytest.raises(SystemExit) as stopped:
            main(["compare", *words])
        error = capsys.readouterr().err
        assert stopped.value.code == 2 and message in error and "Traceback" not in error, (words, error)


def test_a_checkpoint_that_does_not_say_what_made_it_has_the_seed_of_its_test(tmp_path):
    a = saved(tmp_path, "a", episodes(1))
    for number, seed in enumerate((3, 4)):
        test = Path(saved(tmp_path / "files", f"t{number}", episodes(number), norm="b")) / "version_1"
        settings = {**told(test)["settings"], "seed_everything": seed}
        identify(test, "test", settings)
        change(test / "results.json", tested_checkpoint=f"{number}.ckpt")
    _, second = compare([a, str(tmp_path / "files")])
    assert second.seeds == (3, 4)
    change(test / "run.json", settings={**settings, "seed_everything": 3})
    with pytest.raises(InputError, match=r"tests of 0\.ckpt and 1\.ckpt, which do not say .* here 3 for both"):
        compare([a, str(tmp_path / "files")])


def test_several_comparisons_are_counted_and_corrected(tmp_path, capsys):
    base, noise = episodes(1), np.random.default_rng(1).normal(0, 0.01, 30)
    noise -= noise.mean()
    unit = noise.std(ddof=1) / np.sqrt(30)
    # Of 29 degrees of freedom: 2.05 at 95%, 2.36 at 97.5%, as one of two.
    runs = [saved(tmp_path, name, base + noise + shift * unit) for name, shift in (("weak", 2.2), ("clear", 9.0))]
    runs, output = [saved(tmp_path, "bn", base), *runs], tmp_path / "table.csv"
    assert [line.distinguishable for line in compare(runs)] == [None, True, True]
    main(["compare", *runs, "--output", str(output)])
    printed = capsys.readouterr().out
    assert "2 comparisons in one table" in printed and "each at 97.50 %" in printed
    rows = [(row["comparisons"], row["distinguishable_among_all"]) for row in csv.DictReader(output.open())]
    assert rows == [("2", ""), ("2", "False"), ("2", "True")]


LABELS = np.random.default_rng(5).integers(0, 4, 400)


def test_two_classifiers_are_paired_by_image(tmp_path, capsys):
    first, second = guesses(LABELS, 0.6, 1), guesses(LABELS, 0.7, 2)
    runs = [classified(tmp_path, "bn", first, LABELS), f"ours={classified(tmp_path, 'swbn', second, LABELS)}"]
    base, line = compare(runs)
    right = [(own == LABELS).astype(float) for own in (first, second)]
    difference = right[1] - right[0]
    assert (line.setting, line.tested, base.mcnemar) == ("test, 4 classes", 400, None)
    assert line.difference.over_episodes.mean == pytest.approx(difference.mean(), abs=1e-12)
    half = 1.965927 * difference.std(ddof=1) / np.sqrt(400)  # t(399)
    assert line.difference.over_episodes.half_width == pytest.approx(half, rel=1e-5)
    assert line.mcnemar[:2] == ((difference > 0).sum(), (difference < 0).sum()) and 0 < line.mcnemar.mcnemar_p < 0.05
    main(["compare", *runs, "--output", str(tmp_path / "x.csv")])
    printed = capsys.readouterr().out
    assert "test, 4 classes, 400 images" in printed and "paired images ± 95%" in printed and "McNemar's p" in printed
    assert (
        f"right: ours {line.mcnemar[0]}, {tmp_path / 'bn'} {line.mcnemar[1]}." in printed and "episode" not in printed
    )
    row = list(csv.DictReader((tmp_path / "x.csv").open()))[1]
    assert row["images"] == "400" and float(row["difference_over_images_ci95"]) == pytest.approx(half, rel=1e-5)
    assert float(row["mcnemar_p"]) == line.mcnemar.mcnemar_p and "episodes" not in row


def test_classifiers_of_several_seeds(tmp_path, capsys):
    given = {(norm, seed): guesses(LABELS, 0.6, 7 * seed + len(norm)) for norm in ("bn", "swbn") for seed in (0, 3)}
    for (norm, seed), predicted in given.items():
        classified(tmp_path / norm, f"seed{seed}", predicted, LABELS, seed, norm=norm)
    _, line = compare([str(tmp_path / "bn"), str(tmp_path / "swbn")])
    right = np.array([[given[norm, seed] == LABELS for seed in (0, 3)] for norm in ("bn", "swbn")], float)
    found = line.difference
    assert found.deciding is found.over_both and line.mcnemar is None and line.paired_seeds == (0, 3)
    assert found.over_episodes.mean == pytest.approx((right[1] - right[0]).mean(), abs=1e-12)
    assert found.over_both.half_width >= max(found.over_seeds.half_width, found.over_episodes.half_width)
    main(["compare", str(tmp_path / "bn"), str(tmp_path / "swbn")])
    assert "Seeds share their test images" in capsys.readouterr().out


def test_folders_that_hold_both_kinds_of_tests(tmp_path, capsys):
    for number, name in enumerate("ab"):
        classified(tmp_path / name, "many", guesses(LABELS, 0.6, number), LABELS, norm=name)
        saved(tmp_path / name, "few", episodes(number), norm=name)
    lines = compare([str(tmp_path / "a"), str(tmp_path / "b")])
    assert [(line.kind.unit, line.tested) for line in lines] == [("episode", 30)] * 2 + [("image", 400)] * 2
    main(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--output", str(tmp_path / "x.csv")])
    rows = list(csv.DictReader((tmp_path / "x.csv").open()))
    assert [(row["episodes"], row["images"]) for row in rows] == [("30", "")] * 2 + [("", "400")] * 2
    few, many = rows[1], rows[3]
    assert few["difference_over_episodes"] and not few["difference_over_images"] and not few["mcnemar_p"]
    assert many["difference_over_images"] and not many["difference_over_episodes"] and many["mcnemar_p"]
    with pytest.raises(InputError, match="no test in common"):
        compare([str(tmp_path / "a" / "many"), str(tmp_path / "b" / "few")])


@pytest.mark.parametrize(("line", "reason"), [
    ("7,x,0,1", "line 3: 'x' is not a whole number"), ("7,0,1.5,1", "line 3: '1.5' is not a whole number"),
    ("7,0,0,1", "holds 2 images, results.json says 400"),
])  # fmt: skip
def test_lists_of_images_that_are_none(tmp_path, line, reason):
    runs = [classified(tmp_path, name, guesses(LABELS, 0.6, 1), LABELS) for name in "ab"]
    (tmp_path / "b" / "version_1" / "images.csv").write_text(f"image,class,predicted,probability\n1,0,0,1\n{line}\n")
    with pytest.raises(InputError, match=r"b/version_1/images\.csv") as error:
        compare(runs)
    assert reason in str(error.value)


def test_other_images_are_refused_by_name(tmp_path):
    a = classified(tmp_path, "a", LABELS, LABELS)
    b = classified(tmp_path, "b", LABELS, LABELS, images_id="other")
    with pytest.raises(InputError, match=r"test, 4 classes: .*b/version_1 .* and .*a/version_1 .* on other images"):
        compare([a, b])
    classified(tmp_path, "old", LABELS, LABELS)
    (tmp_path / "old" / "version_1" / "images.csv").unlink()  # as versions wrote it that saved no images
    with pytest.raises(InputError, match=r"old holds no test \(runs: 2, none with episodes.csv or images.csv\)"):
        compare([a, str(tmp_path / "old")])
