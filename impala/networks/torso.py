"""Torsos: uint8 frames in, float32 features out.

Inside `torch.autocast` frames are converted straight to its type, which holds 0 to 255 exactly.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn
from torch.nn import functional as F


class Torso(nn.Module):
    """The contract. Frames go from 0 to 255; images are [channels, height, width]."""

    out_features: int

    def forward(self, frames: UInt8[Tensor, " N *frame"]) -> Float[Tensor, "N F"]:
        """Float32 features of frames [N, *frame_shape]; F is `out_features`."""
        raise NotImplementedError


class MLP(Torso):
    """Two hidden layers over the flattened frame, for small observations."""

    def __init__(self, frame_shape: tuple[int, ...], *, hidden_size: int = 256) -> None:
        super().__init__()
        self.out_features = hidden_size
        self.layers = nn.Sequential(
            nn.Flatten(),
            nn.Linear(math.prod(frame_shape), hidden_size),
            nn.ReLU(inplace=True),
            nn.Linear(hidden_size, hidden_size),
            nn.ReLU(inplace=True),
        )
        initialise(self)

    def forward(self, frames: UInt8[Tensor, " N *frame"]) -> Float[Tensor, "N F"]:
        return self.layers(frames.float() / 255.0).float()


class Shallow(Torso):
    """Two convolutions and a linear layer: 16 of 8x8 stride 4, 32 of 4x4 stride 2, 256.

    Espeholt et al. 2018, figure 3 left, with the sizes of Mnih et al. 2016. For Atari the paper
    says "the same as Mnih et al. 2016, which features three convolutional layers", but that
    network has two, and so has this. The paper's 1.2 million parameters need VALID padding.

    normalise: before each ReLU, give every channel of an image zero mean and unit variance
        (instance normalisation, Ulyanov et al. 2016), and likewise the hidden layer of a frame
        (layer normalisation, Ba et al. 2016); no parameters are added. In a game most pixels
        never change. They are then most of what a unit sees, its weights move together at each
        step of Adam, and most units soon are always off or always on; what moves is lost.
    motion_gain: None, or weights of the first convolution are for the newest frame and, this many
        times stronger, for what changed from each frame of the stack to the next. It is the same
        function of other parameters, in which what moves weighs more than the background.
    """

    def __init__(
        self,
        frame_shape: tuple[int, ...],
        *,
        hidden_size: int = 256,
        normalise: bool = False,
        motion_gain: float | None = None,
    ) -> None:
        super().__init__()
        # A channel is normalised over its image, which has to have two points.
        channels, height, width = _image_shape(frame_shape, smallest=28 if normalise else 20)
        self.out_features = hidden_size
        self.normalise = normalise
        mixing = None
        if motion_gain is not None:  # Unlike the paper:
            if type(motion_gain) not in (int, float) or not 0 < motion_gain < math.inf:
                raise ValueError(
                    f"network.torso.motion_gain={motion_gain}: expected null or a number above 0"
                )
            frames = torch.eye(channels)  # the oldest first
            mixing = motion_gain * (frames.roll(-1, 0) - frames)
            mixing[-1] = frames[-1]
        self.mixing: Tensor | None
        self.register_buffer("mixing", mixing, persistent=False)
        self.conv1 = nn.Conv2d(channels, 16, kernel_size=8, stride=4)
        self.conv2 = nn.Conv2d(16, 32, kernel_size=4, stride=2)
        rows, columns = (((size - 8) // 4 - 3) // 2 + 1 for size in (height, width))
        self.linear = nn.Linear(32 * rows * columns, hidden_size)
        initialise(self)

    def forward(self, frames: UInt8[Tensor, "N C H W"]) -> Float[Tensor, "N F"]:
        x = F.relu(self._normalised(self._first_convolution(frames)), inplace=True)
        x = F.relu(self._normalised(self.conv2(x)), inplace=True)
        x = self.linear(_flatten_channels_last(x))
        if self.normalise:  # Unlike the paper:
            x = F.layer_norm(x, x.shape[-1:])
        return F.relu(x, inplace=True).float()

    def _normalised(self, x: Float[Tensor, "N C H W"]) -> Float[Tensor, "N C H W"]:
        # group_norm would keep x channels-last, and takes ten times as long on a CPU.
        return F.instance_norm(x) if self.normalise else x

    def _first_convolution(self, frames: UInt8[Tensor, "N C H W"]) -> Float[Tensor, "N 16 h w"]:
        """conv1 of frames / 255, as 2x2 with stride 1 over blocks of 4x4 pixels.

        The same sums, but channels-last with 16 C channels, the layout that CPUs and GPUs
        multiply fastest; the permutation is of uint8, the smallest thing to move.
        """
        count, channels, height, width = frames.shape
        rows, columns = height // 4, width // 4
        frames = frames[:, :, : 4 * rows, : 4 * columns].contiguous()
        words = frames.view(torch.int32)  # four pixels of a row travel as one
        blocks = words.view(count, channels, rows, 4, columns).permute(0, 2, 4, 1, 3).contiguous()
        blocks = blocks.view(torch.uint8).view(count, rows, columns, 16 * channels)
        weight = self.conv1.weight / 255.0
        if self.mixing is not None:
            weight = torch.einsum("ochw,cd->odhw", weight, self.mixing)
        weight = weight.view(-1, channels, 2, 4, 2, 4)
        weight = weight.permute(0, 1, 3, 5, 2, 4).flatten(1, 3)
        return F.conv2d(_converted(blocks).permute(0, 3, 1, 2), weight, self.conv1.bias)


class Deep(Torso):
    """The residual network of 15 convolutions, Espeholt et al. 2018, figure 3 right.

    Three stages of 16, 32 and 32 channels: convolution, max-pooling, two residual blocks; then
    a linear layer of 256. Padding is TensorFlow's SAME, as in the paper's code.
    """

    def __init__(
        self,
        frame_shape: tuple[int, ...],
        *,
        channels: tuple[int, ...] = (16, 32, 32),
        hidden_size: int = 256,
    ) -> None:
        super().__init__()
        in_channels, height, width = _image_shape(frame_shape, smallest=1)
        self.out_features = hidden_size
        self.stages = nn.ModuleList()
        for stage, out_channels in enumerate(channels):
            convolution = _FrameConvolution if stage == 0 else nn.Conv2d
            self.stages.append(
                nn.Sequential(
                    convolution(in_channels, out_channels, kernel_size=3, padding=1),
                    _SameMaxPool(),
                    _ResidualBlock(out_channels),
                    _ResidualBlock(out_channels),
                )
            )
            in_channels, height, width = out_channels, (height + 1) // 2, (width + 1) // 2
        self.linear = nn.Linear(in_channels * height * width, hidden_size)
        initialise(self)

    def forward(self, frames: UInt8[Tensor, "N C H W"]) -> Float[Tensor, "N F"]:
        # Channels-last trains 1.5 times as fast on CPUs; reordered while still uint8.
        x = _converted(frames.contiguous(memory_format=torch.channels_last))
        for stage in self.stages:
            x = stage(x)
        x = F.relu(x, inplace=True)
        return F.relu(self.linear(_flatten_channels_last(x)), inplace=True).float()


class _FrameConvolution(nn.Conv2d):
    """A convolution of frames / 255, with the scale in the weight: one pass over them less."""

    def forward(self, input: Float[Tensor, "N C H W"]) -> Float[Tensor, "N D H W"]:
        return self._conv_forward(input, self.weight / 255.0, self.bias)


class _SameMaxPool(nn.Module):
    """3x3 with stride 2 and TensorFlow's SAME padding, which pads even sizes at the end only."""

    def forward(self, x: Float[Tensor, "N C H W"]) -> Float[Tensor, "N C h w"]:
        padding = (x.shape[2] % 2, x.shape[3] % 2)
        return F.max_pool2d(x, kernel_size=3, stride=2, padding=padding, ceil_mode=True)


class _ResidualBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, kernel_size=3, padding=1)

    def forward(self, x: Float[Tensor, "N C H W"]) -> Float[Tensor, "N C H W"]:
        residual = F.relu(self.conv1(F.relu(x)), inplace=True)
        return self.conv2(residual).add_(x)


def initialise(torso: Torso) -> None:
    """Orthogonal weights of gain sqrt(2), zero biases: features keep their scale through ReLUs.

    PyTorch's default makes them smaller at every layer of the shallow network.
    Residual branches begin near zero: each would add as much as it is given, and the features of
    the deep network grow with every block.
    """
    for module in torso.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            nn.init.orthogonal_(module.weight, gain=2**0.5)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    for block in torso.modules():
        if isinstance(block, _ResidualBlock):
            nn.init.orthogonal_(block.conv2.weight, gain=0.1)


def _converted(frames: Tensor) -> Tensor:
    device = frames.device.type
    if torch.is_autocast_enabled(device):
        return frames.to(torch.get_autocast_dtype(device))
    return frames.float()


def _flatten_channels_last(x: Float[Tensor, "N C H W"]) -> Float[Tensor, "N H*W*C"]:
    # The order of TensorFlow, and free: in the other order both the features and, in the
    # backward pass, their gradient would be copied, and ReLU would meet two layouts.
    return x.permute(0, 2, 3, 1).flatten(1)


def _image_shape(frame_shape: tuple[int, ...], smallest: int) -> tuple[int, int, int]:
    if len(frame_shape) != 3 or min(frame_shape[1:]) < smallest:
        raise ValueError(
            f"this torso reads images [channels, height, width] of at least {smallest}x{smallest} "
            f"pixels, got frames of shape {tuple(frame_shape)}: choose another one, such as mlp"
        )
    channels, height, width = frame_shape
    return channels, height, width
