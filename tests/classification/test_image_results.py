"""What a classifier's evaluation keeps of each image: against numpy, and through the trainer."""

import csv
import io

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from classification import GlyphDataModule, ImageClassifier, ImageFolderDataModule, ImageNetDataModule, MNISTDataModule
from classification.datamodules.base import ClassificationDataModule, LabelledBatch, NumberedBatch
from classification.evaluation import image_result, rows_of
from cli import main
from tests.classification.test_class_folders import write_images

QUIET = {
    "accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
    "enable_model_summary": False,
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_figures_are_numpys(dtype):
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(3 * rng.normal(size=(50, 9))).to(dtype)
    labels, numbers = rng.integers(0, 9, 50), rng.permutation(50)
    # In batches, in any order, and some images twice, as a sampler pads them.
    places = np.append(np.arange(50), [3, 7])
    batches = [torch.from_numpy(part) for part in np.split(places, [20, 33])]
    given = torch.from_numpy(numbers), torch.from_numpy(labels), logits
    found = image_result([rows_of(*(column[part] for column in given)) for part in batches], 9, processes=1)
    ordered = np.argsort(numbers)
    exact = logits.double().numpy()[ordered]
    p = np.exp(exact) / np.exp(exact).sum(1, keepdims=True)
    y = labels[ordered]
    assert found.numbers.tolist() == list(range(50)) and found.labels.tolist() == y.tolist()
    assert found.predicted.tolist() == p.argmax(1).tolist()
    np.testing.assert_allclose(found.probabilities, p.max(1), rtol=1e-5)
    np.testing.assert_allclose(found.losses, -np.log(p[np.arange(50), y]), rtol=1e-4, atol=1e-6)
    right, top = p.argmax(1) == y, (np.argsort(-p, axis=1)[:, :5] == y[:, None]).any(1)
    assert found.accuracy == right.mean() and found.top5 == top.mean() and right.mean() < top.mean() < 1
    assert found.ci95 == pytest.approx(2.009575 * right.std(ddof=1) / np.sqrt(50), rel=1e-6)  # t(49)
    assert found.loss == pytest.approx(-np.log(p[np.arange(50), y]).mean(), rel=1e-5)


def classifier(channels=1, classes=10):
    torch.manual_seed(0)
    return ImageClassifier(num_classes=classes, backbone="resnet20", backbone_args={"in_channels": channels})


def result_of(model, data):
    pl.Trainer(**QUIET).test(model, datamodule=data, verbose=False)
    return model.image_results["test"]


@pytest.fixture(scope="module")
def imagenet(tmp_path_factory):
    root = tmp_path_factory.mktemp("large")
    write_images(root / "train", ("n01", "n02", "n03"), 4, size=(50, 40), suffix=".JPEG")
    write_images(root / "val", ("n01", "n02", "n03"), 5, size=(90, 60), suffix=".JPEG", seed=1)
    return ImageNetDataModule(root=str(root), image_size=16, eval_resize=20, num_workers=0, eval_batch_size=4)


@pytest.mark.parametrize("kind", ["memory", "one by one"])
def test_files_hold_what_the_network_says_of_each_image(kind, tiny_mnist, imagenet):
    memory = kind == "memory"
    data = MNISTDataModule(root=str(tiny_mnist), eval_batch_size=16) if memory else imagenet
    model = classifier(*((1, 10) if memory else (3, 3)))
    found, row = result_of(model, data), model.results["test"]
    everything = data.evaluation_dataset("test").__getitems__(list(range(len(found.numbers))))
    with torch.no_grad():
        probabilities = model.eval()(data.normalize(everything.images)).softmax(-1)
    files = {name: list(csv.DictReader(io.StringIO(text))) for name, text in model.evaluation_files("test").items()}
    assert [int(line["image"]) for line in files["images.csv"]] == list(range(41 if memory else 15))
    for name, expected in (("class", everything.labels), ("predicted", probabilities.argmax(1))):
        assert [int(line[name]) for line in files["images.csv"]] == expected.tolist()
    given = [float(line["probability"]) for line in files["images.csv"]]
    assert given == pytest.approx(probabilities.max(1).values.tolist(), abs=2e-6)
    assert row["accuracy"] == pytest.approx(np.mean([a["class"] == a["predicted"] for a in files["images.csv"]]))
    names = tuple("0123456789") if memory else ("n01", "n02", "n03")
    assert tuple(line["name"] for line in files["classes.csv"]) == names
    assert sum(int(line["count"]) for line in files["confusion.csv"]) == row["images"] == len(found.numbers)
    assert row["macro_f1"] == found.confusion.macro_f1 and row["images_id"] == result_of(model, data).identity(
        names, data.chosen_by("test")
    )


class Padded(ClassificationDataModule):
    """Data of the user's: read one by one, without names, and of another length than a sampler shards."""

    num_classes, image_size, has_validation = 3, 8, False

    def __init__(self, batch=NumberedBatch):
        super().__init__(mean=(0.5,), std=(0.25,))
        self.batch = batch

    def evaluation_dataset(self, split):
        images, labels = torch.randint(256, (7, 1, 8, 8), dtype=torch.uint8), torch.arange(7) % 3

        class Images(Dataset):
            def __len__(self):
                return 7

            def __getitems__(_, numbers):
                given = images[numbers], labels[numbers], torch.tensor(numbers)
                return self.batch(*given[: len(self.batch._fields)])

        return Images()

    def test_dataloader(self):
        dataset = self.evaluation_dataset("test")
        shards = [list(DistributedSampler(dataset, 2, rank, shuffle=False)) for rank in (0, 1)]
        assert sum(map(len, shards)) == 8  # the stock sampler gives an image twice
        return DataLoader(dataset, batch_sampler=shards, collate_fn=lambda batch: batch)


def test_an_image_counts_once_however_the_sampler_pads():
    model = classifier(classes=3)
    found = result_of(model, Padded())
    assert found.numbers.tolist() == list(range(7)) and found.labels.tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert "0,0," in model.evaluation_files("test")["classes.csv"]  # its classes have numbers for names
    with pytest.raises(ValueError, match="must be a NumberedBatch of images, labels .* got LabelledBatch"):
        result_of(model, Padded(LabelledBatch))


def test_the_identity_is_that_of_the_images(tmp_path):
    for folder in ("small", "large/train", "large/val"):
        write_images(tmp_path / folder, ("a", "b"), 10, size=(9, 9))

    def identity(data, names=None):
        labels = data.image_set("test").labels
        ones = torch.ones(len(labels))
        rows = [rows_of(torch.arange(len(labels)), labels, torch.stack([ones, 0 * ones], dim=1))]
        return image_result(rows, 2, 1).identity(names or data.class_names("test"), data.chosen_by("test"))

    folders = {"root": str(tmp_path / "small"), "image_size": 8}
    first = identity(ImageFolderDataModule(**folders))
    assert first == identity(ImageFolderDataModule(**{**folders, "image_size": 6}, batch_size=4, seed=3))
    # Other images, of the same labels in the same order.
    assert first != identity(ImageFolderDataModule(**folders, split_seed=1))
    assert first != identity(ImageFolderDataModule(**folders), names=("a", "c"))

    def large(split):
        return ImageNetDataModule(root=str(tmp_path / "large"), image_size=8, eval_resize=8).chosen_by(split)

    # Other files, of as many images of the same classes.
    before = large("val"), large("test")
    for folder in ("small", "large/train"):
        (tmp_path / folder / "a" / "1.png").rename(tmp_path / folder / "a" / "10.png")
    assert first != identity(ImageFolderDataModule(**folders))
    assert large("val") != before[0] and large("test") == before[1] != before[0]
    letters = [GlyphDataModule(num_classes=2, images_per_class=8, seed=seed) for seed in (0, 0, 1)]
    same, again, other = map(identity, letters)
    assert same == again != other


def test_a_checkpoint_knows_the_names_of_its_classes(tmp_path, monkeypatch):
    Image.new("L", (28, 28), 90).save(tmp_path / "one.png")
    options = {"num_classes": 3, "images_per_class": 4, "batch_size": 4, "query": str(tmp_path / "one.png")}
    data, model = GlyphDataModule(**options), classifier(classes=3)
    trainer = pl.Trainer(**QUIET, max_steps=1, limit_val_batches=0)
    trainer.fit(model, datamodule=data)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    names = data.image_set("train").class_names
    loaded = ImageClassifier.load_from_checkpoint(tmp_path / "a.ckpt")
    assert loaded.class_names == names and len(names) == 3

    def changed(class_names):
        content = torch.load(tmp_path / "a.ckpt", weights_only=True)
        torch.save({**content, "class_names": class_names}, tmp_path / "b.ckpt")
        return ImageClassifier.load_from_checkpoint(tmp_path / "b.ckpt")

    def predicted(own):
        with torch.no_grad():
            expected = own.eval()(data.normalize(torch.full((1, 1, 28, 28), 90, dtype=torch.uint8))).softmax(-1)
        (found,) = pl.Trainer(**QUIET).predict(own, datamodule=GlyphDataModule(**options))
        torch.testing.assert_close(found, expected)
        return own.prediction_classes

    assert predicted(loaded) == names
    assert predicted(changed(None)) == names  # the data's, of a checkpoint without any
    assert changed(["a\x1b[2J", "b", "c"]).class_names == (r"a\x1b[2J", "b", "c")  # which act on no terminal
    for given in ([1, 2, 3], "abc", {"a": 1}):
        with pytest.raises(ValueError, match="class_names are no list of texts"):
            changed(given)
    with pytest.raises(ValueError, match="2 class names are known, but num_classes is 3"):
        predicted(changed(["a", "b"]))
    monkeypatch.setattr(pl.Trainer, "world_size", 2)
    loaded.trainer = pl.Trainer(**QUIET)
    with pytest.raises(ValueError, match=r"in one process; give --trainer\.devices 1"):
        loaded.on_predict_start()


def test_imagenet_reads_an_image_to_name_as_those_of_its_test(imagenet, tmp_path):
    path = next(iter(imagenet.evaluation_dataset("test").files))
    expected = imagenet.evaluation_dataset("test").__getitems__([0]).images[0]
    data = ImageNetDataModule(image_size=16, eval_resize=20, num_workers=0, query=path)  # without a root
    data.setup("predict")
    (batch,) = data.predict_dataloader()
    assert torch.equal(batch.images[0], expected) and data.query_files == (path,)
    model, trainer = classifier(3, 3), pl.Trainer(**QUIET, max_steps=0)
    options = {"image_size": 16, "eval_resize": 20, "num_workers": 0, "val_share": 0, "batch_size": 4}
    trainer.fit(model, datamodule=ImageNetDataModule(root=imagenet.root, **options))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    main([
        "predict", "--model=ImageClassifier", "--model.num_classes=3", "--model.backbone=resnet20",
        "--data=ImageNetDataModule", "--data.image_size=16", "--data.eval_resize=20", "--data.num_workers=0",
        f"--data.query={path}", f"--ckpt_path={tmp_path / 'a.ckpt'}", "--trainer.accelerator=cpu",
        f"--run.root={tmp_path}", "--run.name=run",
    ])  # fmt: skip
    assert (tmp_path / "run/version_0/predictions.csv").read_text().count("\n") == 2
