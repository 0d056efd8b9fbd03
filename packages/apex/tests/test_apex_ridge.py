"""Leave-one-out ridge in closed form against its definition."""

import numpy as np
import torch

from lyceum_apex.ridge import fit, leave_one_out, r_squared


def refit_without(x: np.ndarray, y: np.ndarray, eps: float) -> np.ndarray:
    """Predictions of n explicit fits: common scale of the batch, centring in each fold."""
    x_std, y_std = x.std(0, ddof=1), y.std(0, ddof=1)
    predictions = np.empty_like(y)
    for i in range(len(x)):
        rest = np.arange(len(x)) != i
        x_mean, y_mean = x[rest].mean(0), y[rest].mean(0)
        xs, ys = (x[rest] - x_mean) / x_std, (y[rest] - y_mean) / y_std
        beta = np.linalg.inv(xs.T @ xs + eps * np.eye(x.shape[1])) @ xs.T @ ys
        predictions[i] = y_mean + ((x[i] - x_mean) / x_std) @ beta * y_std
    return predictions


def test_acceptance_05_hat_matrix_leave_one_out_equals_explicit_refits_to_1e_8() -> None:
    rng = np.random.default_rng(0)
    for n, d, eps in ((200, 64, 1.0), (30, 40, 0.1)):
        x = rng.normal(size=(n, d)) * rng.uniform(0.1, 10, d) + 3
        y = x[:, :3] @ rng.normal(size=(3, 4)) + rng.normal(size=(n, 4)) + 100
        result = leave_one_out(torch.from_numpy(x), torch.from_numpy(y), eps)
        predictions = refit_without(x, y, eps)
        np.testing.assert_allclose(result.predictions.numpy(), predictions, rtol=0, atol=1e-8)
        loss = (((y - predictions) / y.std(0, ddof=1)) ** 2).mean()
        np.testing.assert_allclose(result.loss.item(), loss, rtol=1e-10)


def test_acceptance_05_gradients_of_the_leave_one_out_loss_pass_gradcheck() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, 3, dtype=torch.float64, generator=generator, requires_grad=True)
    y = torch.randn(12, 2, dtype=torch.float64, generator=generator, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, b: leave_one_out(a, b).loss, (x, y))


def test_ridge_recovers_a_linear_function_and_ignores_a_constant_column() -> None:
    x = np.random.default_rng(1).normal(size=(50, 4))
    x[:, 3] = 7.0
    y = x[:, :3] @ np.array([[1.0], [-2.0], [3.0]]) + 5.0
    beta, bias = fit(x, y, eps=1e-9)
    np.testing.assert_allclose(beta, [[1.0, -2.0, 3.0, 0.0]], atol=1e-8)
    np.testing.assert_allclose(bias, [5.0], atol=1e-8)
    assert r_squared(y, x @ beta.T + bias) == 1.0 or abs(r_squared(y, x @ beta.T + bias)[0] - 1) < 1e-12


def test_a_constant_column_is_told_although_its_deviation_does_not_round_to_0() -> None:
    rng = np.random.default_rng(2)
    x, y = rng.normal(size=(200, 3)), rng.normal(size=(200, 2))
    x[:, 2] = y[:, 1] = 0.3
    assert x[:, 2].std(ddof=1) > 0
    beta, bias = fit(x, y)
    assert np.abs(beta[:, 2]).max() < 1e-12
    np.testing.assert_allclose(beta[1], 0, atol=1e-12)
    np.testing.assert_allclose(bias[1], 0.3, atol=1e-12)
    assert r_squared(y, np.zeros_like(y))[1] == 0
    constant = torch.full((200, 1), -0.123)
    assert constant.std(0) > 0
    assert leave_one_out(torch.from_numpy(x.astype(np.float32)), constant).loss < 1e-12
