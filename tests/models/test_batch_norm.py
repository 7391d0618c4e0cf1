"""Batch norm over real images alone, of one rank and of three, against torch's own over the same images."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from forks import prepared_here
from vitscale.errors import RequestError
from vitscale.models.batch_norm import BatchNorm, norms_of, over_real_images

CHANNELS = 5
SHARES = {"all count": [(0, 2, 2), (2, 5, 3), (5, 6, 1)], "padding": [(0, 3, 3), (3, 6, 1), (6, 8, 0)]}
"""Of each rank: its first image, the one after its last, and how many of them count."""


Found = tuple[dict[str, Tensor], list[dict[str, dict[str, Any]]]]
"""What was given, and what each rank made of it, synchronised and local."""


def given(shares: list[tuple[int, int, int]]) -> dict[str, Tensor]:
    """Images whose means lie far from 0, where sums of squares lose digits."""
    torch.manual_seed(0)
    images = 20 * torch.rand(CHANNELS)[:, None, None] + torch.randn(shares[-1][1], CHANNELS, 3, 4)
    return {
        "images": images,
        "gradient": torch.randn_like(images),
        "weight": torch.rand(CHANNELS),
        "bias": torch.rand(CHANNELS),
        "shares": torch.tensor(shares),
    }


def own_norm(tensors: dict[str, Tensor]) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(CHANNELS)
    with torch.no_grad():
        norm.weight.copy_(tensors["weight"])
        norm.bias.copy_(tensors["bias"])
    return norm


@pytest.fixture(scope="module", params=list(SHARES))
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What was given, and what each of three ranks made of it."""
    folder = tmp_path_factory.mktemp("norms")
    tensors = given(SHARES[request.param])
    torch.save(tensors, folder / "images.pt")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    variables = {"WORLD_SIZE": 3, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
    started = [
        prepared_here().start(
            Path(__file__).with_name("batch_norm_ranks.py"),
            folder,
            log=folder / f"log-{rank}.txt",
            environment=variables | {"RANK": rank},
        )
        for rank in range(3)
    ]
    codes = [one.wait(100) for one in started]
    assert codes == [0, 0, 0], [(folder / f"log-{rank}.txt").read_text()[-2000:] for rank in range(3)]
    return tensors, [torch.load(folder / f"rank-{rank}.pt", weights_only=True) for rank in range(3)]


@pytest.mark.ranks
def test_synchronised_it_is_one_process_over_all_real_images(ranks: Found) -> None:
    """Forward, gradients and running statistics; a rank whose images are all padding takes part and adds nothing."""
    tensors, found = ranks
    shares = [tuple(share) for share in tensors["shares"].tolist()]
    counting = [index for first, _, real in shares for index in range(first, first + real)]
    norm = own_norm(tensors)
    images = tensors["images"][counting].clone().requires_grad_(True)
    normed = norm(images)
    torch.autograd.backward((normed * tensors["gradient"][counting]).sum())
    assert images.grad is not None
    expected, of_images = torch.zeros_like(tensors["images"]), torch.zeros_like(tensors["images"])
    expected[counting], of_images[counting] = normed.detach(), images.grad
    for (first, last, _), rank in zip(shares, found, strict=True):
        own = rank["synchronised"]
        torch.testing.assert_close(own["normed"], expected[first:last], rtol=1e-5, atol=2e-5)
        torch.testing.assert_close(own["of_images"], of_images[first:last], rtol=1e-5, atol=2e-5)
        for name, parameter in norm.named_parameters():
            torch.testing.assert_close(own[name], parameter.grad, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(own["running_mean"], norm.running_mean, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(own["running_var"], norm.running_var, rtol=1e-5, atol=1e-6)
        assert own["batches"] == 1
        # To the bit on all ranks: they are broadcast by nobody.
        assert torch.equal(own["running_var"], found[0]["synchronised"]["running_var"])


@pytest.mark.ranks
def test_local_it_is_each_ranks_own_and_the_mean_of_all_when_evaluated(ranks: Found) -> None:
    tensors, found = ranks
    statistics = []
    for (first, last, real), rank in zip(tensors["shares"].tolist(), found, strict=True):
        norm = own_norm(tensors)
        expected = torch.zeros_like(tensors["images"][first:last])
        if real:
            expected[:real] = norm(tensors["images"][first : first + real]).detach()
        assert norm.running_mean is not None
        statistics.append(norm.running_mean)
        assert torch.equal(rank["local"]["normed"], expected)
        assert rank["local"]["batches"] == (1 if real else 0)
    for rank in found:
        torch.testing.assert_close(rank["local"]["running_mean"], torch.stack(statistics).mean(dim=0))


def test_two_zero_images_of_eight_are_seen_by_torchs_own_and_not_by_ours() -> None:
    torch.manual_seed(1)
    images = torch.cat([1 + torch.randn(6, CHANNELS, 4, 4), torch.zeros(2, CHANNELS, 4, 4)])
    alone = nn.BatchNorm2d(CHANNELS)(images[:6])
    norm = BatchNorm(nn.BatchNorm2d(CHANNELS), synchronised=True)
    norm.real = 6
    assert torch.equal(norm(images)[:6], alone)
    assert (nn.BatchNorm2d(CHANNELS)(images)[:6] - alone).abs().max() > 0.3


def test_weights_of_a_local_norm_have_a_gradient_where_no_image_counts() -> None:
    """Of 0, so that whoever exchanges gradients waits for none; statistics stay."""
    norm = BatchNorm(nn.BatchNorm2d(CHANNELS), synchronised=False)
    norm.real = 0
    normed = norm(torch.randn(2, CHANNELS, 4, 4))
    assert torch.equal(normed, torch.zeros(2, CHANNELS, 4, 4))
    torch.autograd.backward(normed.sum())
    for parameter in norm.parameters():
        assert torch.equal(parameter.grad if parameter.grad is not None else parameter, torch.zeros(CHANNELS))
    assert norm.num_batches_tracked is not None
    assert norm.num_batches_tracked == 0


@pytest.mark.parametrize("synchronised", [True, False])
def test_one_image_pooled_to_one_pixel_is_refused_with_what_to_do(synchronised: bool) -> None:
    """The second is padding."""
    norm = BatchNorm(nn.BatchNorm2d(CHANNELS), synchronised=synchronised)
    norm.real = 1
    with pytest.raises(RequestError, match=r"one value has no variance\. Set train.micro_batch = 2 or more"):
        norm(torch.randn(2, CHANNELS, 1, 1))
    assert norm(torch.randn(2, CHANNELS, 2, 1)).isfinite().all()
    assert norm.eval()(torch.randn(1, CHANNELS, 1, 1)).isfinite().all()


def test_every_norm_of_a_model_is_replaced_and_its_names_stay() -> None:
    model = nn.Sequential(nn.Conv2d(3, CHANNELS, 1), nn.Sequential(nn.BatchNorm2d(CHANNELS), nn.ReLU()))
    before = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    images = torch.randn(2, 3, 4, 4)
    model.eval()
    expected = model(images)
    over_real_images(model, synchronised=False)
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == before
    assert len(norms_of(model)) == 1
    assert torch.equal(model(images), expected)
    assert not norms_of(model.train())[0].synchronised


class Activated(nn.BatchNorm2d):
    """As timm's BatchNormAct2d."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


class Renamed(nn.BatchNorm2d):
    """Torch's own but for the name."""


def test_a_norm_with_a_forward_of_its_own_is_refused_and_not_replaced_by_half_of_it() -> None:
    model = nn.Sequential(nn.Conv2d(3, CHANNELS, 1), nn.Sequential(Renamed(CHANNELS), nn.SyncBatchNorm(CHANNELS)))
    for _ in range(2):  # those that are there already may be replaced
        over_real_images(model, synchronised=True)
    assert len(norms_of(model)) == 2
    with pytest.raises(RequestError, match=r"'1\.1' is a batch norm with a forward of its own, 'Activated', and norms"):
        over_real_images(nn.Sequential(nn.Identity(), nn.Sequential(nn.Identity(), Activated(3))), synchronised=True)
