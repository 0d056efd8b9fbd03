"""Ridge regression with an unpenalised intercept, and its leave-one-out predictions in closed form.

Columns are centred and divided by one common standard deviation per batch. With the intercept unpenalised, centring
within each fold is then implied exactly, and leave-one-out residuals are ordinary residuals over 1 - h_i, where h is
the diagonal of the hat matrix H = 1/n + X (X'X + eps I)^-1 X' (the PRESS identity: Allen, Technometrics 16 (1974)
125; Golub, Heath, Wahba, Technometrics 21 (1979) 215). Scaling within each fold, as in the authors' code, has no such
form; the common scale differs from it by O(1/n).
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class LeaveOneOut:
    """`loss`: mean over properties of mean_i (y_i - prediction without i)^2 / var(y). `predictions` [n, P]: of each row
    from the others, in the units of the data."""

    loss: torch.Tensor
    predictions: torch.Tensor


def leave_one_out(x: torch.Tensor, y: torch.Tensor, eps: float = 1.0) -> LeaveOneOut:
    """Leave-one-out ridge of `y` [n, P] on `x` [n, d]; differentiable in both. A constant column of either counts as
    scale 1."""
    n, d = x.shape
    x_mean, y_mean = x.mean(0), y.mean(0)
    x_std, y_std = _scale(x), _scale(y)
    xs, ys = (x - x_mean) / x_std, (y - y_mean) / y_std
    factor = torch.linalg.cholesky(xs.T @ xs + eps * torch.eye(d, dtype=x.dtype))
    inverse_x = torch.cholesky_solve(xs.T, factor)  # A^-1 X', [d, n]
    beta = inverse_x @ ys
    leverage = 1.0 / n + (xs * inverse_x.T).sum(1)
    residual = (ys - xs @ beta) / (1.0 - leverage).unsqueeze(1)
    return LeaveOneOut(loss=residual.square().mean(), predictions=y - residual * y_std)


def _scale(x: torch.Tensor) -> torch.Tensor:
    # A constant column is told by its range: the standard deviation of rounded differences from the mean need not be 0.
    return torch.where(x.amax(0) > x.amin(0), x.std(0, correction=1), 1.0)


def fit(x: npt.ArrayLike, y: npt.ArrayLike, eps: float = 1.0) -> tuple[FloatArray, FloatArray]:
    """Ridge in float64: slopes [P, d] and intercepts [P] in the units of the data, penalty `eps` on standardised
    columns."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    x_mean, y_mean = x.mean(0), y.mean(0)
    x_std = np.where(x.max(0) > x.min(0), x.std(0, ddof=1), 1.0)
    xs = (x - x_mean) / x_std
    beta = np.linalg.solve(xs.T @ xs + eps * np.eye(x.shape[1]), xs.T @ (y - y_mean)) / x_std[:, None]
    return beta.T, y_mean - x_mean @ beta


def r_squared(truth: npt.NDArray[np.floating], prediction: npt.NDArray[np.floating]) -> FloatArray:
    """1 - residual / total sum of squares, per column; 0 for a constant column."""
    total = ((truth - truth.mean(0)) ** 2).sum(0)
    residual = ((truth - prediction) ** 2).sum(0)
    varies = truth.max(0) > truth.min(0)
    return np.where(varies, 1.0 - residual / np.where(varies, total, 1.0), 0.0)
