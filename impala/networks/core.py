"""Cores: what an agent remembers from row to row, and where it forgets."""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn


class Core(nn.Module):
    """The contract, for agents of any kind. The state is a tuple of tensors [B, ...]."""

    out_features: int

    def initial_state(self, batch_size: int) -> tuple[Tensor, ...]:
        """The state before the first row of an episode."""
        raise NotImplementedError

    def forward(
        self,
        features: Float[Tensor, "T B F"],
        first: Bool[Tensor, "T B"],
        state: tuple[Tensor, ...],
    ) -> tuple[Float[Tensor, "T B H"], tuple[Tensor, ...]]:
        """Outputs of T rows and the state after the last; H is `out_features`.

        The state is zeroed exactly where `first` is true, before that row is read.
        """
        raise NotImplementedError


class FeedForward(Core):
    """No memory: the features are the output and the state is ()."""

    def __init__(self, in_features: int) -> None:
        super().__init__()
        self.out_features = in_features

    def initial_state(self, batch_size: int) -> tuple[Tensor, ...]:
        return ()

    def forward(
        self,
        features: Float[Tensor, "T B F"],
        first: Bool[Tensor, "T B"],
        state: tuple[Tensor, ...],
    ) -> tuple[Float[Tensor, "T B F"], tuple[Tensor, ...]]:
        return features, state


class LSTM(Core):
    """One layer (Hochreiter and Schmidhuber 1997), with the state (hidden [B, H], cell [B, H]).

    Gates stand in PyTorch's order: input, forget, candidate, output. As in the paper's
    `LSTMBlockCell` there is one bias, and the forget gate's starts at 1.
    """

    def __init__(self, in_features: int, *, hidden_size: int = 256) -> None:
        super().__init__()
        self.out_features = hidden_size
        self.input = nn.Linear(in_features, 4 * hidden_size)
        self.recurrent = nn.Linear(hidden_size, 4 * hidden_size, bias=False)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -1.0 / math.sqrt(hidden_size), 1.0 / math.sqrt(hidden_size))
        nn.init.zeros_(self.input.bias)
        nn.init.ones_(self.input.bias[hidden_size : 2 * hidden_size])

    def initial_state(self, batch_size: int) -> tuple[Tensor, ...]:
        zeros = self.recurrent.weight.new_zeros(batch_size, self.out_features)
        return zeros, zeros.clone()

    def forward(
        self,
        features: Float[Tensor, "T B F"],
        first: Bool[Tensor, "T B"],
        state: tuple[Tensor, ...],
    ) -> tuple[Float[Tensor, "T B H"], tuple[Tensor, ...]]:
        weight = self.recurrent.weight
        gates = self.input(features).to(weight.dtype)  # of all rows at once
        keep = (~first).to(weight.dtype).unsqueeze(-1)
        outputs, hidden, cell = _Recurrence.apply(gates, weight, keep, *state)
        return outputs, (hidden, cell)


class _Recurrence(torch.autograd.Function):
    """The part of an LSTM that must go row by row, with no more than that in the loops.

    gates [T, B, 4H] are the products of the input, keep [T, B, 1] is 0 where the state is
    zeroed. Differentiated by hand because autograd would multiply and add up the gradient of
    the recurrent weight once a row instead of once, half of the time with 8 columns.
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        gates: Float[Tensor, "T B 4H"],
        weight: Float[Tensor, "4H H"],
        keep: Float[Tensor, "T B 1"],
        hidden: Float[Tensor, "B H"],
        cell: Float[Tensor, "B H"],
    ) -> tuple[Tensor, Tensor, Tensor]:
        size = hidden.shape[-1]
        gates = gates.clone()
        outputs, hiddens, cells, squashed = gates.new_empty(4, *gates.shape[:2], size)
        transposed = weight.t()
        for row in range(len(gates)):
            hidden = torch.mul(hidden, keep[row], out=hiddens[row])
            cell = torch.mul(cell, keep[row], out=cells[row])
            gate = gates[row].addmm_(hidden, transposed)
            gate[:, : 2 * size].sigmoid_()
            gate[:, 2 * size : 3 * size].tanh_()
            gate[:, 3 * size :].sigmoid_()
            write, retain, candidate, read = gate.chunk(4, dim=-1)
            cell = torch.addcmul(write * candidate, retain, cell)
            hidden = torch.mul(read, torch.tanh(cell, out=squashed[row]), out=outputs[row])
        ctx.save_for_backward(gates, weight, keep, hiddens, cells, squashed)
        return outputs, hidden.clone(), cell

    @staticmethod
    def backward(ctx, d_outputs: Tensor, d_hidden: Tensor, d_cell: Tensor):  # pyright: ignore
        gates, weight, keep, hiddens, cells, squashed = ctx.saved_tensors
        write, retain, candidate, read = gates.chunk(4, dim=-1)
        # Derivatives of the cell by the first three gates, before their nonlinearities, of the
        # hidden state by the fourth, and of the hidden state by the cell.
        cell_by_gates = torch.stack(
            [
                candidate * write * (1 - write),
                cells * retain * (1 - retain),
                write * (1 - candidate.square()),
            ],
            dim=2,
        )
        hidden_by_read = squashed * read * (1 - read)
        hidden_by_cell = read * (1 - squashed.square())

        # `out` also keeps autocast away from products that must stay in float32.
        d_gates = gates.new_empty(*gates.shape[:2], 4, weight.shape[1])
        for row in reversed(range(len(gates))):
            d_hidden = d_hidden + d_outputs[row]
            d_cell = torch.addcmul(d_cell, d_hidden, hidden_by_cell[row])
            d_gate = d_gates[row]
            torch.mul(d_cell.unsqueeze(1), cell_by_gates[row], out=d_gate[:, :3])
            torch.mul(d_hidden, hidden_by_read[row], out=d_gate[:, 3])
            d_hidden = torch.mm(d_gate.flatten(1), weight, out=d_hidden).mul_(keep[row])
            d_cell = (d_cell * retain[row]).mul_(keep[row])
        d_gates = d_gates.flatten(2)
        d_weight = torch.empty_like(weight)
        torch.mm(d_gates.flatten(0, 1).t(), hiddens.flatten(0, 1), out=d_weight)
        return d_gates, d_weight, None, d_hidden, d_cell
