"""How a project guards the compiled region of its model: copy this file, put your model in, run `pytest --vsa-accept`.

The structure that has to stay is in `expected/`. A layer that no longer fuses, an operator that is called twice or a
line that breaks the graph fails the test, with the difference.
"""

import pytest
import torch

import vsa_inductor as vsa


class Layer(torch.nn.Module):
    def forward(self, x: torch.Tensor, layout: vsa.TileLayout) -> torch.Tensor:
        q, k, v = x.chunk(3, -1)
        out = vsa.video_sparse_attention(q * 0.5, k, v, layout, sparsity=0.5)
        return x + torch.cat((out, out, out), -1)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer(), Layer()])

    def forward(self, x: torch.Tensor, layout: vsa.TileLayout) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, layout)
        return x


def inputs(*video: int) -> tuple[torch.Tensor, vsa.TileLayout]:
    layout = vsa.TileLayout.from_video_shape(*video)
    return torch.randn(1, layout.num_tokens, 2, 48), layout


@pytest.mark.vsa_region(
    opaque_per_layer={"vsa.attention": 1, "vsa.attention_backward": 1, "vsa.select_blocks": 1},
    layers=2,
    stored=True,
)
def test_a_training_step_is_one_region(vsa_region):
    x, layout = inputs(5, 4, 4)
    vsa_region.check(vsa.compile(Model()), x.requires_grad_(), layout, fused=[("vsa.tile", "aten.mul")])


def test_a_second_video_shape_compiles_once_more_and_a_third_does_not(vsa_region):
    calls = [inputs(5, 4, 4), inputs(9, 4, 8), inputs(6, 8, 4)]
    vsa_region.check_recompiles(vsa.compile(Layer()), calls, at_most=1)
