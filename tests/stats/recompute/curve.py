"""The curve through the rungs of the reference, as rows of weights of the losses of the rungs."""

import numpy as np


def unit(count, rung):
    return np.eye(count)[rung]


def secant(held_out, b):
    """Slope of the line through the rungs b and b + 1."""
    count = len(held_out)
    return (unit(count, b) - unit(count, b + 1)) / (held_out[b] - held_out[b + 1])


def parabola(held_out, b):
    """Slope at the rung b of the parabola through it and its neighbours, or the nearest three."""
    count = len(held_out)
    first = min(max(b - 1, 0), count - 3)
    x = held_out[first : first + 3] - held_out[b]
    out = np.zeros(count)
    out[first : first + 3] = np.linalg.inv(np.stack([x**0, x, x**2]).T)[1]
    return out


class Curve:
    def __init__(self, held_out, loss):
        self.held_out = held_out
        self.count = len(held_out)
        self.kinds = [self.kind(b, loss) for b in range(self.count)]

    def segments_at(self, b):
        return [s for s in (b - 1, b) if 0 <= s < self.count - 1]

    def kind(self, b, loss):
        """(how the slope at the rung is obtained, of which segment)"""
        if self.count == 2:
            return "secant", 0
        steepness = {s: secant(self.held_out, s) @ loss for s in self.segments_at(b)}
        smaller = min(steepness, key=steepness.get)
        slope = parabola(self.held_out, b) @ loss
        if slope <= 0 or steepness[smaller] <= 0:
            return "zero", 0
        return ("limited", smaller) if slope > 3 * steepness[smaller] else ("parabola", 0)

    def slope(self, held_out, b):
        kind, segment = self.kinds[b]
        if kind == "zero":
            return np.zeros(self.count)
        if kind == "parabola":
            return parabola(held_out, b)
        return (3 if kind == "limited" else 1) * secant(held_out, segment)

    def segment(self, h):
        return int(np.clip(np.sum(self.held_out > h) - 1, 0, self.count - 2))

    def weights(self, h, held_out=None):
        held_out = self.held_out if held_out is None else held_out
        b = self.segment(h)
        t = (h - held_out[b]) / (held_out[b + 1] - held_out[b])
        if t < 0 or t > 1:
            end = b if t < 0 else b + 1
            return unit(self.count, end) + (h - held_out[end]) * self.slope(held_out, end)
        width = held_out[b + 1] - held_out[b]
        return (
            (1 + 2 * t) * (1 - t) ** 2 * unit(self.count, b)
            + t**2 * (3 - 2 * t) * unit(self.count, b + 1)
            + t * (1 - t) ** 2 * width * self.slope(held_out, b)
            + t**2 * (t - 1) * width * self.slope(held_out, b + 1)
        )

    def derivative_by_h(self, h):
        step = 1e-6 * (self.held_out[0] - self.held_out[-1])
        return (self.weights(h + step) - self.weights(h - step)) / (2 * step)

    def derivative_by_rungs(self, weights):
        """[b, k] = d weights_k / dH_b, of a function of all H."""
        step = 1e-6 * (self.held_out[0] - self.held_out[-1])
        rows = []
        for b in range(self.count):
            move = step * unit(self.count, b)
            rows.append((weights(self.held_out + move) - weights(self.held_out - move)) / 2 / step)
        return np.array(rows)
