"""Omniglot in its forms, and that no character is in two splits."""

import shutil
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image

from fewshot import EpisodicDataModule
from fewshot.datasets import get_dataset
from fewshot.datasets.omniglot import OMNIGLOT_MEAN, OMNIGLOT_STD, load_omniglot

SPLITS = ("train", "val", "test")


def draw(folder, alphabet, characters=2, drawings=3, first=0):
    """White pages with one black pixel, whose place tells character and drawing."""
    for character in range(1, characters + 1):
        place = folder / alphabet / f"character{character:02}"
        place.mkdir(parents=True)
        for drawing in range(first, first + drawings):
            page = np.full((28, 28), 255, np.uint8)
            page[character, drawing] = 0
            Image.fromarray(page).convert("1").save(place / f"{alphabet[0]}{character}_{drawing:02}.png")


ALPHABETS = tuple("ABCDEFGHIJ")


@pytest.fixture
def lake(tmp_path):
    for alphabet in ALPHABETS:
        draw(tmp_path / "images_background", alphabet)
    for alphabet in ("Y", "Z"):
        draw(tmp_path / "images_evaluation", alphabet)
    return tmp_path


def alphabets(image_set):
    return {name.partition("/")[0] for name in image_set.class_names}


def test_strokes_are_white_and_classes_are_characters_of_alphabets(lake):
    image_set = load_omniglot("test", str(lake))
    assert image_set.class_names == ("Y/character01", "Y/character02", "Z/character01", "Z/character02")
    assert image_set.images.shape == (12, 1, 28, 28) and image_set.labels.tolist() == np.repeat(range(4), 3).tolist()
    expected = torch.zeros(28, 28, dtype=torch.uint8)
    expected[2, 1] = 255  # character 2, drawing 1
    assert torch.equal(image_set.images[4, 0], expected)
    assert load_omniglot("test", str(lake), 14).images.shape == (12, 1, 14, 14)


@pytest.mark.parametrize("name", ["omniglot", "omniglot-rotations"])
def test_predict_sees_the_pixels_that_training_saw(lake, name):
    learnt = get_dataset(name).load("test", str(lake), 28)
    folder = lake / "images_evaluation" / "Y"
    data = EpisodicDataModule(name, root=str(lake), support=str(folder), query=str(folder / "character01"))
    data.setup("predict")
    unturned = learnt.images[:6]  # of the alphabet Y, which stands first, as it stands in the files
    assert torch.equal(data.prediction.support.images, unturned) and torch.equal(data.prediction.query, unturned[:3])
    assert data.prediction.support.class_names == ("character01", "character02")


@pytest.mark.parametrize("nested", [False, True])
def test_whole_alphabets_are_held_out_by_a_fixed_seed(lake, nested):
    if nested:  # a zip unpacked into a folder of its name, in torchvision's folder
        (lake / "images_background").rename(lake / "inner")
        (lake / "omniglot-py" / "images_background").mkdir(parents=True)
        (lake / "inner").rename(lake / "omniglot-py" / "images_background" / "images_background")
        (lake / "images_evaluation").rename(lake / "omniglot-py" / "images_evaluation")
        lake /= "omniglot-py"
    train, val, test = (load_omniglot(split, str(lake)) for split in SPLITS)
    assert alphabets(test) == {"Y", "Z"}
    assert len(alphabets(val)) == 2 and len(alphabets(train)) == 8  # a fifth of ten
    assert alphabets(train) | alphabets(val) == set(ALPHABETS) and not alphabets(train) & alphabets(val)
    assert load_omniglot("val", str(lake)).class_names == val.class_names
    assert "8 of 10 alphabets, drawn by seed 0; not Vinyals et al.'s" in train.source
    assert f"2 of 10 alphabets, drawn by seed 0 ({', '.join(sorted(alphabets(val)))})" in val.source
    assert "images_evaluation: the evaluation set, 4 characters" in test.source

    shutil.rmtree(lake / "images_evaluation")
    parts = [load_omniglot(split, str(lake)) for split in SPLITS]
    assert [len(alphabets(part)) for part in parts] == [6, 2, 2]
    assert set.union(*map(alphabets, parts)) == set(ALPHABETS)
    assert parts[1].class_names == val.class_names


def test_a_character_that_stands_in_two_sets_is_one_class_and_a_drawing_is_taken_once(tmp_path):
    for alphabet in ("A", "B", "C"):
        draw(tmp_path / "images_background_small1", alphabet)
    draw(tmp_path / "images_background_small2", "A", first=2)  # drawing 2 again, and 3 and 4
    draw(tmp_path / "images_background_small2", "D")
    parts = [load_omniglot(split, str(tmp_path)) for split in SPLITS]
    names = [name for part in parts for name in part.class_names]
    assert len(names) == len(set(names)) == 8
    (owner,) = (part for part in parts if "A/character01" in part.class_names)
    images = owner.images[owner.labels == owner.class_names.index("A/character01")]
    assert images.argmax(-1).amax((1, 2)).tolist() == [0, 1, 2, 3, 4]

    draw(tmp_path / "images_evaluation", "D", first=7)
    for split in SPLITS:
        with pytest.raises(ValueError, match=r"the class 'D/character01' is in both \w+ and test"):
            load_omniglot(split, str(tmp_path))


def test_four_rotations_are_four_classes(lake):
    plain = load_omniglot("test", str(lake))
    turned = get_dataset("omniglot-rotations").load("test", str(lake), 28)
    assert turned.num_classes == 16 and len(turned) == 48 and "in four rotations" in turned.source
    for degrees in (0, 90, 180, 270):
        label = turned.class_names.index(f"Y/character02/rot{degrees:03}")
        for image, upright in zip(turned.images[turned.labels == label], plain.images[plain.labels == 1], strict=True):
            expected = np.asarray(Image.fromarray(upright[0].numpy()).rotate(degrees))  # Pillow's are counter-clockwise
            assert np.array_equal(image[0].numpy(), expected)


@pytest.mark.parametrize(
    ("place", "ending"), [("", ("",)), ("splits/vinyals", ("/rot000", "/rot090", "/rot180", "/rot270"))]
)
def test_lists_of_characters(lake, place, ending):
    lists = {
        "train": ["A/character01", "Z/character02"],
        "val": ["A/character02"],  # an alphabet may be in two splits where the lists say so
        "test": ["B/character01"],
    }
    (lake / place).mkdir(parents=True, exist_ok=True)
    for split, characters in lists.items():
        lines = [name + end for name in characters for end in ending]
        (lake / place / f"{split}.txt").write_text("\n".join(lines) + "\n")
    for split, characters in lists.items():
        image_set = load_omniglot(split, str(lake))
        assert list(image_set.class_names) == characters and len(image_set) == 3 * len(characters)
        assert f"characters listed in {lake / place / split}.txt" in image_set.source
        assert load_omniglot(split, str(lake), rotations=True).num_classes == 4 * len(characters)
    for text, words in (
        ("A/character01\n", "'A/character01' is in both train and val"),
        ("A/character09\n", "names A/character09, which is not in"),
        ("A/character02/rot090\n", "names A/character02/rot090, which is not in"),  # without the other three
    ):
        (lake / place / "val.txt").write_text(text)
        with pytest.raises(ValueError, match=words):
            load_omniglot("train", str(lake))


def test_roots_that_hold_nothing_of_it(tmp_path):
    with pytest.raises(ValueError, match="give a root"):
        load_omniglot("train", None)
    (tmp_path / "images_background.zip").write_text("")
    with pytest.raises(ValueError, match=r"it holds images_background.zip\). Looked for Lake et al.'s zips, unpacked"):
        load_omniglot("train", str(tmp_path))
    for alphabet in "AB":
        draw(tmp_path / "images_background", alphabet)
    with pytest.raises(ValueError, match="2 alphabets in .* are too few to divide; give at least 3"):
        load_omniglot("train", str(tmp_path))


def test_the_small_sets_share_no_character_between_splits(real_data, tmp_path):
    for number in (1, 2):
        zipfile.ZipFile(real_data / "omniglot" / f"images_background_small{number}.zip").extractall(tmp_path)
    parts = [load_omniglot(split, str(tmp_path)) for split in SPLITS]
    # 136 + 156 characters, of which the 24 Greek and 26 Latin ones stand twice, each with the same 20 drawings.
    assert sum(part.num_classes for part in parts) == 136 + 156 - 24 - 26
    assert all((torch.bincount(part.labels) == 20).all() for part in parts)
    names = [alphabets(part) for part in parts]
    assert sum(map(len, names)) == len(set.union(*names)) == 8
    pixels = torch.cat([part.images for part in parts]).double() / 255
    assert pixels.mean().item() == pytest.approx(OMNIGLOT_MEAN, abs=5e-4)
    assert pixels.std().item() == pytest.approx(OMNIGLOT_STD, abs=5e-4)
