"""The three methods as LightningModules: training, checkpoints, evaluation, pre-training."""

import json
import re
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from PIL import Image
from pytorch_lightning.callbacks import EMAWeightAveraging, ModelCheckpoint

from classification import GlyphDataModule, ImageClassifier
from cli import main
from fewshot import CrossAttentionNetwork, MatchingNetwork, PrototypicalNetwork
from swbn_lightning.training.callbacks.update_norms import UpdateNorms
from tests.fewshot.conftest import CHANNELS, QUIET, shades
from tests.fewshot.cross_attention_reference import literal, literal_losses

pytestmark = pytest.mark.usefixtures("small_things")
METHODS = [
    (PrototypicalNetwork, {}),
    (MatchingNetwork, {}),
    (MatchingNetwork, {"full_context": True, "context_steps": 2}),
    (CrossAttentionNetwork, {"fusion_norm": "swbn-fro"}),
]


@pytest.mark.parametrize(("method", "options"), METHODS)
def test_a_checkpoint_gives_the_same_figures_in_a_new_object(method, options, tmp_path):
    pl.seed_everything(0)
    kept = ModelCheckpoint(dirpath=tmp_path)
    trainer = pl.Trainer(max_epochs=1, callbacks=[kept], **QUIET)
    model = method(backbone="tiny", **options)
    start = model.backbone.stages[0][0].weight.clone()
    trainer.fit(model, datamodule=shades())
    assert not torch.equal(model.backbone.stages[0][0].weight, start)
    trainer.test(model, datamodule=shades(), verbose=False)
    path = kept.best_model_path
    assert torch.load(path, weights_only=True)["hyper_parameters"]["backbone"] == "tiny"

    for again in (method.load_from_checkpoint(path, weights_only=True), method(backbone="tiny", **options)):
        pl.Trainer(**QUIET).test(again, datamodule=shades(), ckpt_path=path, verbose=False)
        assert again.results["test"] == model.results["test"]
        for name, tensor in model.state_dict().items():
            assert torch.equal(again.state_dict()[name], tensor), name
    # A loaded one can go on training.
    loaded = method.load_from_checkpoint(path)
    pl.Trainer(max_epochs=1, **QUIET).fit(loaded, datamodule=shades())


def test_the_loss_of_cross_attention_and_its_gradient_equal_the_literal_version():
    model = CrossAttentionNetwork(backbone="tiny", image_size=12, num_classes=9).double()
    assert model.head.num_positions == 9
    support = torch.randn(2, 3, 2, CHANNELS, 3, 3, dtype=torch.float64, requires_grad=True)
    query = torch.randn(2, 12, CHANNELS, 3, 3, dtype=torch.float64, requires_grad=True)
    classes = torch.tensor([[8, 0, 5], [5, 2, 7]])
    learnt = [*model.head.parameters(), *model.classifier.parameters(), support, query]

    loss, accuracy = model.episode_loss(support, query, classes)
    gradients = torch.autograd.grad(loss, learnt)
    weights = {**dict(model.head.fusion.named_buffers()), **dict(model.head.fusion.named_parameters())}
    result = literal(support.mean(2), query, weights, training=True)
    overall, episodic = literal_losses(result, (model.classifier.weight, model.classifier.bias), classes, queries=4)
    expected = overall + 0.5 * episodic
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-10)
    for found, literally in zip(gradients, torch.autograd.grad(expected, learnt), strict=True):
        torch.testing.assert_close(found, literally, rtol=1e-7, atol=1e-10)
    target = torch.arange(3).repeat_interleave(4)
    assert accuracy.item() == pytest.approx((result.logits.argmax(-1) == target).double().mean().item(), abs=1e-6)


def test_cross_attention_through_the_command(capsys):
    arguments = [
        "--model=fewshot.CrossAttentionNetwork", "--model.backbone=tiny", "--data=fewshot.EpisodicDataModule",
        "--data.dataset=shades", "--data.train={ways: 4, queries: 2, episodes: 4}", "--trainer.accelerator=cpu",
        "--data.val={ways: 3, shots: 2, queries: 4, episodes: 30}", "--data.episodes_per_step=2", "--run.name=can",
        "--data.test={ways: 3, shots: 2, queries: 4, episodes: 30}", "--whiteness.num_images=16",
    ]  # fmt: skip
    main(["fit", *arguments, "--trainer.max_epochs=1"])
    capsys.readouterr()
    for number, (more, inference) in enumerate([([], None), (["--model.transductive=true"], "transductive")], 1):
        main(["test", *arguments, "--ckpt_path=runs/can", *more])
        (row,) = json.loads(Path(f"runs/can/version_{number}/results.json").read_text())["results"]
        printed = capsys.readouterr()
        assert row.get("inference") == inference and row["episodes"] == 30
        assert bool(re.search(r"│ inference +│ +transductive │", printed.out)) is (inference is not None)
        assert "the checkpoint's" not in printed.err  # nothing was given that it would override

    for name, shade in (("dark", 20), ("bright", 220)):
        (Path("support") / name).mkdir(parents=True)
        Image.new("L", (16, 16), shade).save(f"support/{name}/0.png")
    Image.new("L", (16, 16), 230).save("support/bright/1.png")  # one more than of the other class
    main(["predict", *arguments, "--ckpt_path=runs/can", "--data.support=support", "--data.query=support/dark/0.png"])
    assert re.search(r"0.png +│ +dark", capsys.readouterr().out)


def test_predict_does_not_let_images_name_each_other():
    model = CrossAttentionNetwork(backbone="tiny", image_size=16, transductive=True)
    with pytest.raises(ValueError, match="names each image by itself"):
        model.trainer = pl.Trainer(**QUIET)
        model.on_predict_start()


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_outside_of_steps_images_are_embedded_as_in_them(precision, tmp_path):
    made = []

    class Watched(PrototypicalNetwork):
        def embed(self, images):
            made.append(super().embed(images))
            return made[-1]

    for name, shade in (("bright", 220), ("dark", 20)):
        (tmp_path / "support" / name).mkdir(parents=True)
        (tmp_path / "query").mkdir(exist_ok=True)
        for number in range(5):
            for file in (f"support/{name}/{number}.png", f"query/{name}{number}.png"):
                Image.new("L", (16, 16), shade + number).save(file)
    trainer = pl.Trainer(precision=precision, **QUIET)
    trainer.predict(Watched(backbone="tiny"), datamodule=shades(support="support", query="query", eval_batch_size=4))
    assert [len(features) for features in made] == 2 * [4, 4, 2]
    examples, queries = torch.cat(made).split(10)
    assert torch.equal(examples, queries) and made[0].dtype == made[-1].dtype

    steps = made[0].dtype
    made.clear()
    by_batch = Watched(backbone="tiny", norm_args={"track_running_stats": False})
    with pytest.warns(UserWarning, match="every episode is evaluated by itself"):
        trainer.test(by_batch, datamodule=shades(), verbose=False)
    assert len(made) == 30 and {features.dtype for features in made} == {steps}


def test_cross_attention_is_refused_data_of_another_size(tmp_path):
    kept = ModelCheckpoint(dirpath=tmp_path)
    pl.Trainer(max_epochs=1, callbacks=[kept], **QUIET).fit(CrossAttentionNetwork(backbone="tiny"), datamodule=shades())
    path = kept.best_model_path
    trainer = pl.Trainer(fast_dev_run=True, **QUIET)
    with pytest.raises(ValueError, match="for maps of 16 positions, but the data's images of 32 pixels means 64"):
        trainer.test(CrossAttentionNetwork.load_from_checkpoint(path), datamodule=shades(image_size=32))
    with pytest.raises(ValueError, match="for maps of 64 positions, but the checkpoint means 16"):
        trainer.test(CrossAttentionNetwork(backbone="tiny"), datamodule=shades(image_size=32), ckpt_path=path)
    with pytest.raises(ValueError, match="for 8 training classes, but the data's training split means 9"):
        trainer.fit(CrossAttentionNetwork(backbone="tiny", num_classes=8), datamodule=shades())
    with pytest.raises(ValueError, match="for 8 training classes, but the checkpoint means 9"):
        CrossAttentionNetwork.load_from_checkpoint(path, num_classes=8)
    with pytest.raises(ValueError, match="needs image_size and num_classes"):
        CrossAttentionNetwork(backbone="tiny").episode_loss(torch.zeros(1), torch.zeros(1), torch.zeros(1))
    with pytest.raises(ValueError, match="keeps no running statistics"):
        trainer.fit(CrossAttentionNetwork(backbone="tiny", fusion_norm_args={"track_running_stats": False}), shades())


def test_weight_averaging_knows_the_head(tmp_path):
    averaging = [EMAWeightAveraging(), UpdateNorms(), ModelCheckpoint(dirpath=tmp_path)]
    model = CrossAttentionNetwork(backbone="tiny")
    with pytest.warns(UserWarning, match="configure_model"):  # Lightning warns of sharded models
        pl.Trainer(max_epochs=1, callbacks=averaging, **QUIET).fit(model, datamodule=shades())
    assert "head.fusion.squeeze.weight" in torch.load(tmp_path / "averaged.ckpt", weights_only=True)["state_dict"]


@pytest.mark.parametrize(("method", "options"), [*METHODS[1:3], (CrossAttentionNetwork, {})])
def test_training_in_16_bits(method, options):
    for precision in ("bf16-mixed", "bf16-true"):
        trainer = pl.Trainer(fast_dev_run=True, precision=precision, **QUIET)
        model = method(backbone="tiny", **options)
        trainer.fit(model, datamodule=shades())
        assert all(p.isfinite().all() for p in model.parameters())


def test_a_probe_evaluates_few_episodes():
    model = PrototypicalNetwork(backbone="tiny")
    pl.Trainer(fast_dev_run=True, **QUIET).validate(model, datamodule=shades(eval_batch_size=66), verbose=False)
    assert model.results["val"]["episodes"] == 20
    pl.Trainer(**QUIET).validate(model, datamodule=shades(), verbose=False)
    assert model.results["val"]["episodes"] == 30


def test_a_backbone_starts_from_a_classifiers_checkpoint(tmp_path):
    classifier = ImageClassifier(5, backbone="tiny", norm="swbn-fro")
    kept = ModelCheckpoint(dirpath=tmp_path, every_n_epochs=1)
    data = GlyphDataModule(num_classes=5, images_per_class=4, batch_size=10)
    pl.Trainer(max_epochs=1, callbacks=[kept], **QUIET).fit(classifier, datamodule=data)
    path = kept.best_model_path
    model = MatchingNetwork(backbone="tiny", norm="swbn-fro", backbone_checkpoint=path)
    for name, tensor in classifier.backbone.state_dict().items():
        assert torch.equal(model.backbone.state_dict()[name], tensor), name
    assert "backbone_checkpoint" not in model.hparams  # its own checkpoint needs the file no more
    with pytest.raises(ValueError, match=r"backbone='tiny', norm='swbn-fro'.*is not this one: .*blocks.0.conv1"):
        PrototypicalNetwork(backbone="resnet12", backbone_checkpoint=path)
    with pytest.raises(ValueError, match="is not this one.*size mismatch"):
        PrototypicalNetwork(backbone="tiny", backbone_args={"width": 4}, norm="swbn-fro", backbone_checkpoint=path)
    torch.save({"state_dict": {"encoder.weight": torch.zeros(1)}}, tmp_path / "other.ckpt")
    with pytest.raises(ValueError, match="holds no backbone: none of its weights is named backbone"):
        PrototypicalNetwork(backbone="tiny", backbone_checkpoint=str(tmp_path / "other.ckpt"))


def test_batch_statistics_at_test_are_said_and_repeatable(tmp_path):
    model = PrototypicalNetwork(backbone="tiny", norm="swbn-fro", norm_args={"track_running_stats": False})
    trainer = pl.Trainer(max_epochs=1, **QUIET)
    with pytest.warns(UserWarning, match=r"keeps no running statistics: every episode is evaluated by itself"):
        trainer.fit(model, datamodule=shades())
    assert model.results["val"]["inference"] == "batch statistics" and model.results["val"]["episodes"] == 30
    rows = []
    for options in ({}, {"eval_batch_size": 5}):
        trainer.test(model, datamodule=shades(**options), verbose=False)
        rows.append(model.results["test"])
    assert rows[0] == rows[1] and rows[0]["accuracy"] > 0.4
