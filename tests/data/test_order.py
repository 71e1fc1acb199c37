"""The order of an epoch, its parts on several processes, and held-out parts."""

import pytest
import torch

from swbn_lightning.data import ImageSet
from swbn_lightning.data.images import hold_out, take
from swbn_lightning.data.order import EpochDataset, EpochSampler, ResumableLoader, stream_seed


class Numbers(EpochDataset[int]):
    def __init__(self, count):
        super().__init__()
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, number):
        return 1000 * self.epoch + number


def test_processes_share_an_epoch_and_hear_its_number():
    seen = {}
    for epoch in (0, 1):
        parts = []
        for rank in range(3):
            dataset = Numbers(20)
            sampler = EpochSampler(dataset, 3, rank, shuffle=True, seed=stream_seed(0), drop_last=True)
            sampler.set_epoch(epoch)
            parts.append(list(sampler))
            assert dataset[7] == 1000 * epoch + 7
        assert [len(part) for part in parts] == [6, 6, 6] and len({*parts[0], *parts[1], *parts[2]}) == 18
        seen[epoch] = parts
    assert seen[0] != seen[1]


def test_held_out_is_the_same_share_of_every_class():
    generator = torch.Generator().manual_seed(0)
    labels = torch.cat([torch.full((n,), c) for c, n in enumerate((40, 7, 1, 0, 100))])
    labels = labels[torch.randperm(len(labels), generator=generator)]
    for share in (0.1, 0.33, 0.9, 0.999):
        kept, held = hold_out(labels, "val_share", share, seed=3)
        assert sorted(kept.tolist() + held.tolist()) == list(range(len(labels)))
        assert kept.tolist() == sorted(kept.tolist()) and held.tolist() == sorted(held.tolist())
        for number, count in enumerate((40, 7, 1, 0, 100)):
            expected = min(round(share * count), max(count - 1, 0))
            assert (labels[held] == number).sum() == expected
    with pytest.raises(ValueError, match="val_share=0.001 of 148 images in 4 classes holds out none; take a larger"):
        hold_out(labels, "val_share", 0.001, seed=3)


@pytest.mark.parametrize(("layout", "channels"), [(torch.contiguous_format, 1), (torch.channels_last, 3)])
def test_subset_takes_whole_images_in_their_layout(layout, channels):
    images = torch.randint(256, (9, channels, 4, 5), dtype=torch.uint8).contiguous(memory_format=layout)
    numbers = torch.tensor([8, 0, 3, 3])
    taken = take(images, numbers)
    assert torch.equal(taken, images[[8, 0, 3, 3]]) and taken.is_contiguous(memory_format=layout)
    part = ImageSet(images, torch.arange(9) % 2, ("a", "b"), "all").subset(numbers, "some")
    assert torch.equal(part.images, taken) and part.labels.tolist() == [0, 0, 1, 1]
    assert part.class_names == ("a", "b") and part.name == "some"


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_goes_on_in_the_middle_of_an_epoch_and_draws_nothing(workers):
    def loader():
        dataset = Numbers(20)
        order = EpochSampler(dataset, 2, 1, shuffle=True, seed=3, drop_last=True)
        return ResumableLoader(dataset, batch_size=2, sampler=order, drop_last=True, num_workers=workers)

    def rest(made, epoch):
        made.sampler.set_epoch(epoch)
        return [batch.tolist() for batch in made]

    state = torch.get_rng_state()
    whole = rest(loader(), 4)
    assert len(whole) == 5
    first = loader()
    first.sampler.set_epoch(4)
    iterator = iter(first)
    assert [next(iterator).tolist(), next(iterator).tolist()] == whole[:2]
    assert first.state_dict() == {"epoch": 4, "batches": 2}
    second = loader()
    second.load_state_dict(first.state_dict())
    assert rest(second, 4) == whole[2:]
    assert second.state_dict() == {"epoch": 4, "batches": 5}
    assert rest(second, 4) == whole  # it was for once
    third = loader()
    third.load_state_dict(first.state_dict())
    assert rest(third, 5) == rest(loader(), 5)  # another epoch is handed out whole
    assert torch.equal(torch.get_rng_state(), state)
