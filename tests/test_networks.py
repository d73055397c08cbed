"""Torsos and cores against plain, slow forms of the same thing."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from impala.networks.core import LSTM, FeedForward
from impala.networks.language import Language
from impala.networks.torso import MLP, Deep, Shallow

IMAGE_SHAPES = [(4, 84, 84), (3, 72, 96), (1, 37, 42), (2, 20, 23)]


@pytest.fixture(autouse=True)
def _seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def random_frames(count: int, frame_shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randint(0, 256, (count, *frame_shape), dtype=torch.uint8)


def plain_shallow(torso: Shallow, frames: torch.Tensor) -> torch.Tensor:
    x = F.relu(F.conv2d(frames / 255, torso.conv1.weight, torso.conv1.bias, stride=4))
    x = F.relu(F.conv2d(x, torso.conv2.weight, torso.conv2.bias, stride=2))
    return F.relu(torso.linear(x.permute(0, 2, 3, 1).reshape(len(x), -1)))


def plain_normalised(torso: Shallow, frames: torch.Tensor) -> torch.Tensor:
    def normalised(x: torch.Tensor) -> torch.Tensor:
        dims = tuple(range(x.ndim))[-2:] if x.ndim == 4 else (-1,)
        centred = x - x.mean(dims, keepdim=True)
        return centred / (centred.square().mean(dims, keepdim=True) + 1e-5).sqrt()

    x = F.conv2d(frames / 255, torso.conv1.weight, torso.conv1.bias, stride=4)
    x = F.conv2d(F.relu(normalised(x)), torso.conv2.weight, torso.conv2.bias, stride=2)
    x = torso.linear(F.relu(normalised(x)).permute(0, 2, 3, 1).reshape(len(x), -1))
    return F.relu(normalised(x))


def same_max_pool(x: torch.Tensor) -> torch.Tensor:
    """TensorFlow's definition: (ceil(size / 2) - 1) * 2 + 3 - size, the odd one at the end."""
    pads: list[int] = []
    for size in (x.shape[3], x.shape[2]):
        total = max((-(-size // 2) - 1) * 2 + 3 - size, 0)
        pads += [total // 2, total - total // 2]
    return F.max_pool2d(F.pad(x, pads, value=-torch.inf), 3, 2)


def plain_deep(torso: Deep, frames: torch.Tensor) -> torch.Tensor:
    x = frames / 255
    for convolution, _, *blocks in torso.stages:
        x = same_max_pool(F.conv2d(x, convolution.weight, convolution.bias, padding=1))
        for block in blocks:
            x = x + block.conv2(F.relu(block.conv1(F.relu(x))))
    return F.relu(torso.linear(F.relu(x).permute(0, 2, 3, 1).reshape(len(x), -1)))


def gradients(module: nn.Module, output: torch.Tensor) -> list[torch.Tensor]:
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    return list(torch.autograd.grad((output * weights).sum(), list(module.parameters())))


@pytest.mark.parametrize(("make", "plain"), [(Shallow, plain_shallow), (Deep, plain_deep)])
@pytest.mark.parametrize("frame_shape", IMAGE_SHAPES)
def test_torso_is_the_plain_network(make, plain, frame_shape):
    torso = make(frame_shape)
    frames = random_frames(3, frame_shape)
    features, expected = torso(frames), plain(torso, frames)
    assert features.shape == (3, torso.out_features) == (3, 256)
    torch.testing.assert_close(features, expected, rtol=1e-4, atol=1e-5)
    for gradient, wanted in zip(
        gradients(torso, features), gradients(torso, expected), strict=True
    ):
        # As wholes: where two units of a pool are all but equal, rounding decides which has it.
        assert (gradient - wanted).norm() < 0.02 * wanted.norm()


@pytest.mark.parametrize("frame_shape", [*IMAGE_SHAPES[:3], (2, 28, 28)])
def test_normalised_torso_is_the_plain_network(frame_shape):
    torso = Shallow(frame_shape, normalise=True)
    frames = random_frames(3, frame_shape)
    features, expected = torso(frames), plain_normalised(torso, frames)
    torch.testing.assert_close(features, expected, rtol=1e-3, atol=1e-4)
    # The biases of the convolutions are taken off again: their gradients are rounding.
    pairs = zip(gradients(torso, features), gradients(torso, expected), strict=True)
    for gradient, wanted in pairs:
        torch.testing.assert_close(gradient, wanted, rtol=1e-2, atol=1e-2)


def test_a_torso_with_a_motion_gain_sees_the_newest_frame_and_what_changed():
    torso, plain = Shallow((4, 84, 84), motion_gain=3.0), Shallow((4, 84, 84))
    frames = random_frames(3, (4, 84, 84))
    seen = frames / 255
    changes = 3.0 * (seen[:, 1:] - seen[:, :-1])  # the newest frame is the last one
    x = torch.cat([changes, seen[:, -1:]], 1)
    x = F.relu(F.conv2d(x, torso.conv1.weight, torso.conv1.bias, stride=4))
    x = F.relu(F.conv2d(x, torso.conv2.weight, torso.conv2.bias, stride=2))
    expected = F.relu(torso.linear(x.permute(0, 2, 3, 1).reshape(3, -1)))
    torch.testing.assert_close(torso(frames), expected, rtol=1e-3, atol=1e-4)
    assert torso.state_dict().keys() == plain.state_dict().keys()
    still = frames[:, :1].expand(-1, 4, -1, -1)
    torso.conv1.weight.data[:, :3] = 0.0  # blind to motion, and nothing moves
    plain.load_state_dict(torso.state_dict())
    plain.conv1.weight.data = torso.conv1.weight.data.clone()
    torch.testing.assert_close(torso(still), plain(still), rtol=1e-3, atol=1e-4)
    # One frame has nothing to have changed from.
    single = Shallow((1, 28, 28), motion_gain=3.0)
    plain = Shallow((1, 28, 28))
    plain.load_state_dict(single.state_dict())
    frames = random_frames(3, (1, 28, 28))
    torch.testing.assert_close(single(frames), plain(frames))


def units_that_tell_frames_apart(normalise: bool) -> int:
    """After it learned a value of -2 for frames that differ in where a ball is."""
    torso = Shallow((4, 84, 84), normalise=normalise)
    baseline = nn.Linear(256, 1)
    frames = torch.full((64, 4, 84, 84), 87, dtype=torch.uint8)
    for frame, row, column in zip(frames, *torch.randint(0, 80, (2, 64)), strict=True):
        frame[:, row : row + 4, column : column + 2] = 236
    optimizer = torch.optim.Adam([*torso.parameters(), *baseline.parameters()], 6e-4, eps=1e-5)
    for _ in range(60):
        loss = (baseline(torso(frames)) + 2.0).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    on = (torso(frames) > 0).float().mean(0)
    return int(((on > 0) & (on < 1)).sum())


@pytest.mark.slow
def test_normalised_units_do_not_die_of_the_background():
    assert units_that_tell_frames_apart(normalise=False) < 50
    assert units_that_tell_frames_apart(normalise=True) > 150


@pytest.mark.parametrize("make", [Shallow, Deep, MLP])
def test_torso_reads_a_slice_of_a_larger_buffer(make):
    """As when columns of a time-major slot are taken."""
    torso = make((2, 24, 24))
    buffer = random_frames(12, (2, 24, 24)).unflatten(0, (3, 4))
    frames = buffer[:, 1:3]
    expected = torso(frames.contiguous().flatten(0, 1))
    torch.testing.assert_close(torso(frames.flatten(0, 1)), expected)
    torch.testing.assert_close(torso(buffer[:, 1]), torso(buffer[:, 1].clone()))


@pytest.mark.parametrize("make", [Shallow, Deep, MLP])
def test_torso_leaves_frames_alone_and_gives_float32_features(make):
    torso = make((2, 24, 24), hidden_size=32)
    frames = random_frames(5, (2, 24, 24))
    before = frames.clone()
    features = torso(frames)
    assert torch.equal(frames, before)
    assert features.shape == (5, 32)
    assert features.dtype == torch.float32
    assert torso.out_features == 32
    with torch.autocast("cpu", torch.bfloat16):
        rounded = torso(frames)
    assert rounded.dtype == torch.float32
    assert not torch.equal(rounded, features)  # it did compute in bfloat16
    torch.testing.assert_close(rounded, features, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("make", [Shallow, Deep, MLP])
def test_white_counts_as_one(make):
    """Scaling is by 255: features of a white frame are those of ones."""
    torso = make((1, 24, 24))
    white = torch.full((1, 1, 24, 24), 255, dtype=torch.uint8)
    one = torso(white // 255)
    black = torso(torch.zeros_like(white))
    white = torso(white)
    assert (white - black).norm() > 50 * (one - black).norm() > 0


def test_mlp_is_two_hidden_layers():
    torso = MLP((1, 10, 5), hidden_size=64)
    linear = [layer for layer in torso.layers if isinstance(layer, nn.Linear)]
    frames = random_frames(3, (1, 10, 5))
    hidden = F.relu(linear[0](frames.reshape(3, 50) / 255))
    torch.testing.assert_close(torso(frames), F.relu(linear[1](hidden)))
    assert [layer.out_features for layer in linear] == [64, 64]


def test_deep_has_15_convolutions_of_which_the_stages_have_16_32_32_channels():
    torso = Deep((4, 84, 84))
    convolutions = [module for module in torso.modules() if isinstance(module, nn.Conv2d)]
    assert [c.out_channels for c in convolutions] == [16] * 5 + [32] * 10
    assert torso.linear.in_features == 11 * 11 * 32


@pytest.mark.parametrize("make", [Shallow, Deep])
@pytest.mark.parametrize("frame_shape", [(84, 84), (50,)])
def test_a_frame_that_is_no_image_is_refused(make, frame_shape):
    with pytest.raises(ValueError, match=r"images \[channels, height, width\]") as error:
        make(frame_shape)
    assert str(frame_shape) in str(error.value)


def test_an_image_too_small_for_the_kernels_is_refused():
    with pytest.raises(ValueError, match="at least 20x20"):
        Shallow((4, 19, 84))
    with pytest.raises(ValueError, match="at least 28x28"):
        Shallow((4, 27, 84), normalise=True)


def cell_loop(
    core: LSTM, features: torch.Tensor, first: torch.Tensor, state: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """One `nn.LSTMCell` step a row and a column, with the state replaced by zeros at resets."""

    def cell(x: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, ...]:
        zero = torch.zeros_like(core.input.bias)
        return torch.lstm_cell(
            x, (h, c), core.input.weight, core.recurrent.weight, core.input.bias, zero
        )

    rows, columns = first.shape
    outputs, finals = [], []
    for b in range(columns):
        h, c = (s[b : b + 1] for s in state)
        column = []
        for t in range(rows):
            if first[t, b]:
                h, c = torch.zeros_like(h), torch.zeros_like(c)
            h, c = cell(features[t, b : b + 1], h, c)
            column.append(h)
        outputs.append(torch.stack(column))
        finals.append((h, c))
    hidden, cells = (torch.cat(parts) for parts in zip(*finals, strict=True))
    return torch.cat(outputs, dim=1), (hidden, cells)


def lstm_case(rows: int = 6, columns: int = 4) -> tuple[LSTM, torch.Tensor, torch.Tensor, tuple]:
    core = LSTM(5, hidden_size=8).double()
    features = torch.randn(rows, columns, 5, dtype=torch.double, requires_grad=True)
    state = tuple(torch.randn(columns, 8, dtype=torch.double, requires_grad=True) for _ in range(2))
    first = torch.zeros(rows, columns, dtype=torch.bool)
    first[0, 0] = first[3, 1] = first[4, 1] = first[-1, 2] = first[3, 2] = True
    return core, features, first, state


def test_lstm_is_a_loop_of_cells_with_resets_in_value_and_gradient():
    core, features, first, state = lstm_case()
    inputs = [features, *state, *core.parameters()]

    def evaluate(outputs, final):
        weights = torch.Generator().manual_seed(1)
        total = sum(
            (x * torch.randn(x.shape, generator=weights, dtype=x.dtype)).sum()
            for x in (outputs, *final)
        )
        return torch.autograd.grad(total, inputs)

    outputs, final = core(features, first, state)
    expected, expected_final = cell_loop(core, features, first, state)
    torch.testing.assert_close(outputs, expected)
    torch.testing.assert_close(final, expected_final)
    for gradient, wanted in zip(
        evaluate(outputs, final), evaluate(expected, expected_final), strict=True
    ):
        torch.testing.assert_close(gradient, wanted)


def test_lstm_gradient_is_the_numerical_one():
    core, features, first, state = lstm_case(columns=3)

    def function(features, hidden, cell, weight):
        arguments = (features, first, (hidden, cell))
        outputs, final = torch.func.functional_call(core, {"recurrent.weight": weight}, arguments)
        return outputs, *final

    weight = core.recurrent.weight.detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(function, (features, *state, weight))


def test_nothing_passes_a_reset():
    core, features, first, state = lstm_case()
    outputs, _ = core(features, first, state)
    gradient = torch.autograd.grad(outputs[3:, 1].sum(), [features, *state])
    assert not gradient[0][:3, 1].any()
    assert gradient[0][3:, 1].any(-1).all()
    assert not gradient[1][1].any()
    assert not gradient[2][1].any()


def test_lstm_row_by_row_is_the_whole_unroll():
    core, features, first, state = lstm_case()
    outputs, final = core(features, first, state)
    for t in range(len(first)):
        row, state = core(features[t : t + 1], first[t : t + 1], state)
        torch.testing.assert_close(row[0], outputs[t])
    torch.testing.assert_close(state, final)


def test_lstm_leaves_the_state_it_was_given_alone():
    core, features, _, state = lstm_case()
    before = [s.detach().clone() for s in state]
    with torch.inference_mode():
        core(features, torch.ones(features.shape[:2], dtype=torch.bool), state)
    for s, old in zip(state, before, strict=True):
        assert torch.equal(s, old)


def test_lstm_begins_with_zeros_and_remembers():
    core = LSTM(5, hidden_size=8)
    hidden, cell = core.initial_state(3)
    assert hidden.shape == cell.shape == (3, 8)
    assert not hidden.any()
    assert not cell.any()
    assert hidden.data_ptr() != cell.data_ptr()
    assert core.input.bias.tolist() == [0.0] * 8 + [1.0] * 8 + [0.0] * 16


def test_lstm_in_autocast_keeps_a_float32_state():
    core = LSTM(5, hidden_size=8)
    features = torch.randn(6, 4, 5)
    first = torch.zeros(6, 4, dtype=torch.bool)
    expected, _ = core(features, first, core.initial_state(4))
    with torch.autocast("cpu", torch.bfloat16):
        outputs, state = core(features, first, core.initial_state(4))
    assert {x.dtype for x in (outputs, *state)} == {torch.float32}
    torch.testing.assert_close(outputs, expected, rtol=0.05, atol=0.01)


def test_lstm_gradients_are_not_rounded_by_autocast_around_the_backward_pass():
    core, features, first, state = lstm_case()
    core, features, state = core.float(), features.float(), tuple(s.float() for s in state)
    weight = core.recurrent.weight
    totals = [core(features, first, state)[0].sum() for _ in range(2)]
    expected = torch.autograd.grad(totals[0], weight)
    with torch.autocast("cpu", torch.bfloat16):
        result = torch.autograd.grad(totals[1], weight)
    torch.testing.assert_close(result, expected)


def test_feed_forward_has_no_memory():
    core = FeedForward(5)
    features = torch.randn(6, 4, 5)
    outputs, state = core(features, torch.zeros(6, 4, dtype=torch.bool), core.initial_state(4))
    assert torch.equal(outputs, features)
    assert state == ()
    assert core.out_features == 5


@pytest.mark.parametrize(
    "module", [MLP((1, 10, 5)), Shallow((4, 84, 84)), Deep((1, 16, 16)), LSTM(5), FeedForward(5)]
)
def test_networks_are_picklable_and_their_weights_are_float32(module):
    copy = pickle.loads(pickle.dumps(module))
    assert copy.state_dict().keys() == module.state_dict().keys()
    assert all(p.dtype == torch.float32 for p in copy.parameters())


def slow_language(language, words):
    """PyTorch's own LSTM, one word of one instruction after the other."""
    cell = torch.nn.LSTMCell(language.embedding.embedding_dim, language.out_features)
    with torch.no_grad():
        cell.weight_ih.copy_(language.lstm.input.weight)
        cell.weight_hh.copy_(language.lstm.recurrent.weight)
        cell.bias_ih.copy_(language.lstm.input.bias)
        cell.bias_hh.zero_()
    state = None
    for word in [w for w in words.tolist() if w] or [0]:
        state = cell(language.embedding.weight[word][None], state)
    return state[0][0]


def test_language_is_the_last_output_over_the_words_of_each_instruction():
    torch.manual_seed(0)
    language = Language(50, embedding_size=5, hidden_size=6)
    words = torch.zeros(3, 4, 7, dtype=torch.int32)
    for row, column, length in ((0, 0, 7), (0, 1, 1), (1, 0, 3), (2, 3, 5)):
        words[row, column, :length] = torch.randint(1, 50, (length,))
    words[2, 0] = words[1, 0]
    words[2, 1, :2] = words[1, 0, :2]  # a beginning of another one
    vectors = language(words)
    expected = torch.stack([slow_language(language, each) for each in words.flatten(0, 1)])
    torch.testing.assert_close(vectors.flatten(0, 1), expected)
    weights = torch.randn_like(vectors)
    ours = torch.autograd.grad((vectors * weights).sum(), language.embedding.weight)
    theirs = torch.autograd.grad(
        (expected.view_as(vectors) * weights).sum(), language.embedding.weight
    )
    torch.testing.assert_close(ours, theirs)


def test_each_instruction_is_read_once_and_where_there_is_none_one_word_is(monkeypatch):
    language, read = Language(50), []
    monkeypatch.setattr(language.lstm, "forward", lambda x, *_: (read.append(x.shape) or x, ()))
    words = torch.zeros(100, 32, 16, dtype=torch.int32)
    language(words)
    words[:50, 3, :4] = 7
    words[50:, 3, :6] = 8
    language(words)
    assert [tuple(shape[:2]) for shape in read] == [(1, 1), (6, 3)]
