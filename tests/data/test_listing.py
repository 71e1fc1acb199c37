"""Which files make up a split: lists, folders, and what they must not share."""

import os
import warnings

import pytest
import torch
from PIL import Image

from swbn_lightning.data.folders import list_class_folders
from swbn_lightning.data.listing import ImageListing, check_apart, load_listing
from swbn_lightning.data.lists import Contained, list_images, read_class_list


def draw(path, shade=0, size=(4, 4)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", size, shade).save(path)
    return path


@pytest.fixture
def pictures(tmp_path):
    for shade, name in enumerate(("cat/1.png", "cat/2.png", "dog/1.png")):
        draw(tmp_path / "images" / name, shade)
    return tmp_path


def listed(root, text, places=("images/{filename}",), name="list.csv"):
    (root / name).write_text(text)
    return list_images("animals", root, root / name, places)


def test_a_list_gives_classes_sorted_and_images_in_its_order(pictures):
    found = listed(pictures, "label,filename,other\r\ndog,dog/1.png,x\r\ncat, cat/2.png,y\r\ncat,cat/1.png,\r\n")
    assert found.classes == {
        "cat": [pictures / "images" / "cat" / name for name in ("2.png", "1.png")],
        "dog": [pictures / "images" / "dog" / "1.png"],
    }
    assert found.labels.tolist() == [0, 0, 1] and found.labels.dtype == torch.int64
    places = ("nowhere/{filename}", "images/{label}/{filename}")
    text = "\ufefffilename,label\n1.png,cat\n2.png,cat\n"  # with the mark that spreadsheets begin files with
    assert listed(pictures, text, places).files == [pictures / "images" / "cat" / n for n in ("1.png", "2.png")]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "needs the columns filename,label, but begins with ''"),
        ("cat/1.png,cat\n", "begins with 'cat/1.png,cat'"),
        ("filename,label\n", "lists no images"),
        ("filename,label\ncat/1.png,\n", "line 2: needs a filename and a label, got 'cat/1.png' and ''"),
        ("filename,label\ncat/1.png,cat\ncat/2.png,cat\n./cat/1.png,cat\n", "twice, in lines 2 and 4"),
        ("filename,label\ncat/1.png,cat\ncat/3.png,cat\n", r"names images that are not there: .*cat/3.png\."),
        ("filename,label\ncat/3.png,cat\n", r"names cat/3.png, which is not there. Looked for .*images/cat/3.png"),
    ],
)
def test_lists_that_cannot_be_used(pictures, text, words):
    with pytest.raises(ValueError, match=f"list.csv.*{words}"):
        listed(pictures, text)


@pytest.mark.parametrize(
    "name",
    ["/etc/hostname", "cat/../../secret.png", "C:\\secret.png", "..\\secret.png"],
)
def test_names_that_leave_the_root(pictures, name):
    draw(pictures / "secret.png")
    for text in (f"filename,label\n{name},cat\n", f"filename,label\ncat/1.png,cat\n{name},cat\n"):
        with pytest.raises(ValueError, match=r"list.csv names .*: names must be relative to .*, without '\.\.'"):
            listed(pictures, text)


def test_links_that_leave_the_root(pictures, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside")
    draw(outside / "cat" / "9.png")
    (pictures / "images" / "cat" / "9.png").symlink_to(outside / "cat" / "9.png")
    with pytest.raises(ValueError, match=rf"cat/9.png', which is a link to {outside}/cat/9.png, outside"):
        listed(pictures, "filename,label\ncat/9.png,cat\n")
    (pictures / "images" / "birds").symlink_to(outside / "cat")
    with pytest.raises(ValueError, match=rf"birds/9.png', which is a link to {outside}/cat, outside"):
        listed(pictures, "filename,label\nbirds/9.png,cat\n")
    # Links that stay inside, and a root that is itself a link, are as good as files.
    (pictures / "images" / "cats").symlink_to(pictures / "images" / "cat")
    (outside / "root").symlink_to(pictures)
    assert Contained(outside / "root")("images/cats/1.png", pictures) == outside / "root" / "images/cats/1.png"


def test_class_lists(tmp_path):
    path = tmp_path / "train.txt"
    path.write_text("# classes\ncat\n\n  dog \n")
    assert read_class_list(path) == ["cat", "dog"]
    for text, words in (("cat\ndog\ncat\n", "lists the class cat twice"), ("# none\n", "lists no classes")):
        path.write_text(text)
        with pytest.raises(ValueError, match=words):
            read_class_list(path)


def test_splits_must_not_share_classes_or_files(pictures):
    def listing(**classes):
        return ImageListing({k: [pictures / "images" / f for f in files] for k, files in classes.items()}, pictures)

    cats, dogs = listing(cat=["cat/1.png", "cat/2.png"]), listing(dog=["dog/1.png"])
    check_apart("animals", {"train": cats, "val": dogs})
    with pytest.raises(ValueError, match="animals: the class 'dog' is in both val and test"):
        check_apart("animals", {"train": cats, "val": dogs, "test": dogs})
    with pytest.raises(ValueError, match=r"cat/2.png of train and .*cat/2.png of val are one and the same file"):
        # ... the same file by the same path is still in two splits.
        check_apart("animals", {"train": cats, "val": listing(tiger=["cat/2.png"])})
    os.link(pictures / "images" / "cat" / "2.png", pictures / "images" / "dog" / "2.png")
    (pictures / "images" / "dog" / "3.png").symlink_to("1.png")
    for name, words in (("2", "cat/2.png of train"), ("3", "dog/1.png of val")):
        with pytest.raises(ValueError, match=rf"{words} and .*dog/{name}.png of val are one and the same file"):
            check_apart("animals", {"train": cats, "val": listing(dog=["dog/1.png", f"dog/{name}.png"])})


def test_what_is_passed_over_is_counted_and_said_once(pictures):
    root = pictures / "images"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list_class_folders(root, "animals").labels.tolist() == [0, 0, 1]
    for name in ("cat/Thumbs.db", "cat/.hidden.png", "dog/notes.txt", "list.csv", ".DS_Store"):
        (root / name).write_bytes(b"x")
    (root / "__MACOSX" / "cat").mkdir(parents=True)
    draw(root / "__MACOSX" / "cat" / "._1.png")
    (root / "cat" / "folder.png").mkdir()
    with pytest.warns(UserWarning) as said:
        image_set = load_listing(list_class_folders(root, "animals"), "animals", 4, channels=1)
    assert len(image_set) == 3 and image_set.class_names == ("cat", "dog")
    assert image_set.images[:, 0, 0, 0].tolist() == [0, 1, 2]
    (warning,) = said
    assert f"animals: passed over 7 that are neither class folder nor image in {root}: .DS_Store" in str(
        warning.message
    )


def test_class_folders_that_cannot_be_used(pictures):
    with pytest.raises(ValueError, match="holds no class folders"):
        list_class_folders(pictures / "images" / "cat", "animals")
    (pictures / "images" / "bird").mkdir()
    (pictures / "images" / "bird" / "1.txt").write_text("")
    with pytest.raises(ValueError, match=r"class folder .*bird holds no images \(looked for .bmp"):
        list_class_folders(pictures / "images", "animals")


def test_folders_that_the_user_linked_are_the_users(pictures, tmp_path_factory):
    store = tmp_path_factory.mktemp("store")
    (pictures / "images").rename(store / "images")
    (pictures / "images").symlink_to(store / "images")
    secret = draw(store / "secret" / "1.png")
    text = "filename,label\n1.png,cat\n"
    assert listed(pictures, text, ["images/{label}/{filename}"]).files == [pictures / "images" / "cat" / "1.png"]
    # The list may write the folder's name itself.
    places = ["images/{filename}", "{filename}"]
    found = listed(pictures, "filename,label\nimages/cat/1.png,cat\n", places)
    assert found.files == [pictures / "images" / "cat" / "1.png"]
    # What a list names must stay in the store, as it must in a root.
    (store / "images" / "cat" / "out.png").symlink_to(secret)
    (store / "images" / "out").symlink_to(secret.parent)
    for name in ("cat/out.png", "out/1.png"):
        with pytest.raises(ValueError, match=rf"{name}', which is a link to {store}/secret.*, outside"):
            listed(pictures, f"filename,label\n{name},cat\n")
    (pictures / "other").symlink_to(secret.parent)  # a link that only the list names
    with pytest.raises(ValueError, match=r"other/1.png', which is a link to .*, outside"):
        listed(pictures, "filename,label\nother/1.png,cat\n", places)
