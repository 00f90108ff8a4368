"""Blocks as stock models have them, for the tests of `sparsify_`."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from twell import Plan, recorded_paths

D, H = 16, 40
ROW = Plan(path="row")


class Gated(nn.Module):
    def __init__(self, combine, bias=False):
        super().__init__()
        self.a, self.b = nn.Linear(D, H, bias=bias), nn.Linear(D, H, bias=bias)
        self.c = nn.Linear(H, D, bias=bias)
        self.combine = combine

    def forward(self, x):
        return self.c(self.combine(self.a(x), self.b(x)))


class Plain(nn.Module):
    def __init__(self, activation, inner=None, outer=None):
        super().__init__()
        self.one, self.two = nn.Linear(D, H), nn.Linear(H, D)
        self.f, self.inner, self.outer = activation, inner or nn.Identity(), outer or nn.Identity()

    def forward(self, y):
        return self.outer(self.two(self.inner(self.f(self.one(y)))))


class Fused(nn.Module):
    def __init__(self, split, factor=None):
        super().__init__()
        self.both, self.out, self.split = nn.Linear(D, 2 * H), nn.Linear(H, D), split
        self.factor = factor or nn.Identity()

    def forward(self, x):
        gate, up = self.split(self.both(x))
        return self.out(self.factor(up) * torch.relu(gate))


class Layer(nn.Module):
    """Its projections are called one after the other, among other things."""

    def __init__(self, p=0.0):
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(D), nn.Linear(D, H), nn.Linear(H, D)
        self.act, self.p = nn.ReLU(), p

    def forward(self, x, mask=None):
        residual = x
        x = self.norm(x) if mask is None else self.norm(x) * mask
        x = self.act(self.fc1(x))
        x = functional.dropout(x, p=self.p, training=self.training)
        x = self.fc2(x)
        return residual + x


class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.act = nn.Linear(D, H), nn.ReLU()

    def forward(self, hidden):
        return self.act(self.dense(hidden))


class Last(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.norm = nn.Linear(H, D), nn.LayerNorm(D)

    def forward(self, hidden, residual):
        return self.norm(self.dense(hidden) + residual)


class Pair(nn.Module):
    def __init__(self, last=None):
        super().__init__()
        self.query, self.first, self.last = nn.Linear(D, D), First(), last or Last()

    def forward(self, x):
        x = self.query(x)
        inner = self.first(x)
        return self.last(inner, x)


def halves(value):
    return value.chunk(2, -1)


def multiply(a, b):
    return torch.relu(a) * b


def model_of(*blocks):
    torch.manual_seed(0)
    return nn.Sequential(*(blocks or (Gated(multiply), Fused(halves), Layer(), Pair())))


def paths(model, x):
    with recorded_paths() as ran:
        y = model(x)
    return y, [piece.path for piece in ran]
