"""``step_size: auto`` of the norm inside cross attention."""

import pytest
import pytorch_lightning as pl

from fewshot import CrossAttentionNetwork, EpisodeSettings, EpisodicDataModule
from swbn_lightning.norms.swbn import SWBN


def test_the_fusions_step_size_can_be_the_runs(tmp_path):
    # Three epochs of two steps; each step goes through the fusion in both directions.
    settings = EpisodeSettings(ways=3, shots=1, queries=2, episodes=4)
    data = EpisodicDataModule(train=settings, val=settings, episodes_per_step=2)
    model = CrossAttentionNetwork(
        backbone="resnet20", backbone_args={"in_channels": 1}, norm="swbn-fro", fusion_norm="swbn-kl",
        norm_args={"step_size": "auto"}, fusion_norm_args={"step_size": "auto"}, step_budget=0.01,
    )  # fmt: skip
    trainer = pl.Trainer(
        max_epochs=3, logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu",
        enable_model_summary=False, limit_val_batches=0, num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(model, datamodule=data)

    def found(module):
        in_backbone = {layer.step_size for layer in module.backbone.modules() if isinstance(layer, SWBN)}
        return [*in_backbone, module.head.fusion.norm.step_size]

    assert found(model) == pytest.approx([0.01 / 6, 0.01 / 12])
    assert model.head.fusion.norm.num_batches_tracked == 12
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert found(CrossAttentionNetwork.load_from_checkpoint(tmp_path / "a.ckpt")) == found(model)


def test_the_fusions_step_size_where_it_cannot_be_found():
    for wrong in ({"fusion_norm": "bn"}, {"fusion_norm": "iternorm"}):
        with pytest.raises(ValueError, match="step_size: auto is for SWBN layers"):
            CrossAttentionNetwork(backbone="resnet20", fusion_norm_args={"step_size": "auto"}, **wrong)
    with pytest.raises(ValueError, match="step_budget must be positive"):
        CrossAttentionNetwork(
            backbone="resnet20", fusion_norm="swbn-kl", fusion_norm_args={"step_size": "auto"}, step_budget=-1.0
        )
