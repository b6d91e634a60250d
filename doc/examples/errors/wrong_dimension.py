"""`gather` along the batch instead of the actions: the shape is right, the numbers are not."""

import torch


def setting():
    """Q-values of 4 observations and 2 actions, and the actions taken."""
    return torch.tensor([[0.0, 1.0], [10.0, 11.0], [20.0, 21.0], [30.0, 31.0]]), torch.tensor([0, 1, 1, 0])


def broken():
    """The values of the actions taken: 0, 11, 21 and 30."""
    q, actions = setting()
    return q.gather(0, actions[:, None]).squeeze(-1).tolist()


def fixed():
    q, actions = setting()
    return q.gather(-1, actions[:, None]).squeeze(-1).tolist()


def is_right(values):
    return values == [0.0, 11.0, 21.0, 30.0]
