"""Tests share their cores with the processes they start: one thread each."""

import torch

torch.set_num_threads(1)
