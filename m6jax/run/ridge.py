"""A linear classifier on pixels: what a model that names classes has to beat.

Least squares to one-hot classes with a penalty on the weights, which is chosen by leaving one
training picture out at a time; both have closed forms.

Axis letters: N training pictures, Q others, D pixels, C classes.
"""

from collections.abc import Sequence

import numpy as np

_PENALTIES = np.logspace(-4, 3, 15)  # relative to the mean eigenvalue


def classify(pixels: np.ndarray, classes: Sequence[str], others: np.ndarray) -> list[str]:
    """Returns the classes that a ridge classifier gives to other pictures.

    Args:
      pixels: [N, D], of any numbers.
      classes: of the N pictures.
      others: [Q, D].
    """
    names, labels = np.unique(np.array(classes), return_inverse=True)
    targets = np.eye(len(names))[labels]
    centre, bias = pixels.mean(0), targets.mean(0)
    x, y = np.asarray(pixels - centre, np.float64), targets - bias
    values, vectors = np.linalg.eigh(x @ x.T)
    values = values.clip(0)
    projected = vectors.T @ y
    scores = []
    for penalty in _PENALTIES * values.mean():
        # The intercept is a direction of its own, without a penalty: 1/N of the diagonal.
        leverage = (vectors**2) @ (values / (values + penalty)) + 1 / len(x)
        fitted = vectors @ (projected * (values / (values + penalty))[:, None])
        left_out = y - (y - fitted) / (1 - leverage).clip(1e-9)[:, None]
        scores.append(np.mean((left_out + bias).argmax(1) == labels))
    penalty = (_PENALTIES * values.mean())[int(np.argmax(scores))]
    dual = vectors @ (projected / (values + penalty)[:, None])  # [N, C]
    found = (others - centre) @ (x.T @ dual) + bias
    return [str(names[i]) for i in found.argmax(1)]
