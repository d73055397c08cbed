"""Instructions: word ids in, one vector for each out."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from impala.networks.core import LSTM


class Language(nn.Module):
    """An embedding of words and an LSTM over them, whose last output counts.

    Espeholt et al. 2018, figure 3, with the sizes of the authors' code. As there, an instruction
    without words is read as a single word, padding.

    An instruction stays for many rows and most tasks have none, so each that differs is read once.

    vocabulary_size: word ids are 0 (padding, only at the end) to vocabulary_size - 1.
    """

    def __init__(
        self, vocabulary_size: int, *, embedding_size: int = 20, hidden_size: int = 64
    ) -> None:
        super().__init__()
        self.out_features = hidden_size
        self.embedding = nn.Embedding(vocabulary_size, embedding_size)
        self.lstm = LSTM(embedding_size, hidden_size=hidden_size)

    def forward(self, words: Int[Tensor, "*rows L"]) -> Float[Tensor, "*rows H"]:
        rows = words.flatten(0, -2)
        told = rows.any(-1)
        # Row 0 is the instruction without words.
        different, inverse = torch.unique(rows[told], dim=0, return_inverse=True)
        which = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
        which[told] = 1 + inverse
        read = self._read(torch.cat([torch.zeros_like(rows[:1]), different]))
        return read[which].unflatten(0, words.shape[:-1])

    def _read(self, instructions: Int[Tensor, "I L"]) -> Float[Tensor, "I H"]:
        lengths = (instructions != 0).sum(-1).clamp(min=1)
        words = instructions[:, : int(lengths.max())].t()
        never = torch.zeros_like(words, dtype=torch.bool)
        outputs, _ = self.lstm(self.embedding(words), never, self.lstm.initial_state(len(lengths)))
        return outputs[lengths - 1, torch.arange(len(lengths), device=words.device)]
