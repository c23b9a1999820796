"""Logits of a model that `--mode=export` wrote, with NumPy alone.

The five most probable ids after some: `python docs/read_model.py FOLDER 0 5 17`.

B rows, T length, V vocabulary, M width, N heads, J of keys, D head size, P prototypes, K choices.
"""

import json
import pathlib
import sys

import numpy as np


def load(folder):
    """Returns config.json's model and the tensors of model.safetensors, as float32."""
    config = json.loads((pathlib.Path(folder) / "config.json").read_text(encoding="utf-8"))
    data = (pathlib.Path(folder) / "model.safetensors").read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    tensors = json.loads(data[8:begin])
    del tensors["__metadata__"]
    for name, about in tensors.items():
        first, last = (begin + offset for offset in about["data_offsets"])
        kind = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}[about["dtype"]]
        x = np.frombuffer(data[first:last], kind).reshape(about["shape"])
        x = (x.astype("<u4") << 16).view("<f4") if about["dtype"] == "BF16" else x
        tensors[name] = x.astype(np.float32)
    return config["model"], tensors


def logits(model, tensors, tokens):
    """Returns float32[B, T, V] of rows int[B, T] that begin with the start id; experts dropless."""
    tokens, (N, J) = np.asarray(tokens), (model["num_heads"], model["num_kv_heads"])
    J, D = J or N, model["head_dim"] or model["embed_dim"] // N
    length, moe = tokens.shape[1], model["moe"]
    if model["patch_dim"] or (moe and moe["router"]["class"] != "TopK"):
        raise ValueError("only text, and routers that are TopK")

    def norm(x, name):
        mean = x.mean(-1, keepdims=True) if model["norm"] == "LAYER" else 0
        x = (x - mean) / np.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + model["norm_epsilon"])
        return x * tensors[f"{name}.scale"] + tensors.get(f"{name}.bias", 0)

    def turn(x):  # rotary positions, halves paired
        if model["positions"] != "ROTARY":
            return x
        angle = np.arange(length)[:, None] * model["rope_base"] ** (-np.arange(D // 2) * 2 / D)
        (sin, cos), (a, b) = (np.sin(angle)[:, None], np.cos(angle)[:, None]), np.split(x, 2, -1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def softmax(x):
        x = np.exp(x - x.max(-1, keepdims=True))
        return x / x.sum(-1, keepdims=True)

    def attend(x, at):
        q, k, v = (
            np.einsum("btm,mnd->btnd", x, tensors[f"{at}.{n}"]) for n in ("query", "key", "value")
        )
        q, k, v = turn(q), turn(k).repeat(N // J, 2), v.repeat(N // J, 2)
        scores = np.einsum("btnd,bsnd->bnts", q, k) / np.sqrt(D)
        scores = np.where(np.tril(np.ones((length, length), bool)), scores, -np.inf)
        return np.einsum("bnts,bsnd,ndm->btm", softmax(scores), v, tensors[f"{at}.output"])

    def act(x):
        if model["activation"] == "SILU":
            return x / (1 + np.exp(-x))
        return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    def feed(x, at, part=...):
        up, gate = x @ tensors[f"{at}.up"][part], tensors.get(f"{at}.gate")
        return (act(up) if gate is None else act(x @ gate[part]) * up) @ tensors[f"{at}.down"][part]

    def experts(x, at):
        P, K = moe["num_prototypes"], moe["num_selected_experts"]
        z = (x @ tensors[f"{at}.router.kernel"]).reshape(*x.shape[:2], P, -1)
        scores = softmax(z) if moe["router"]["scores"] == "SOFTMAX" else 1 / (1 + np.exp(-z))
        bias = tensors.get(f"{at}.router.bias", np.zeros(moe["num_experts"])).reshape(P, -1)
        chosen = np.argsort(-(scores + bias), -1, kind="stable")[..., :K]  # [B, T, P, K]
        weights = np.take_along_axis(scores, chosen, -1)
        weights = weights / weights.sum(-1, keepdims=True) if moe["normalize_weights"] else weights
        chosen = chosen + z.shape[-1] * np.arange(P)[:, None]
        y = feed(x, f"{at}.shared") if moe["num_shared_experts"] else np.zeros_like(x)
        for e in np.unique(chosen):
            b, t, p, k = np.nonzero(chosen == e)
            np.add.at(y, (b, t), weights[b, t, p, k, None] * feed(x[b, t], at, e))
        return y

    x = tensors["embedder.table"][tokens] * (
        model["embed_dim"] ** 0.5 if model["scale_embedding"] else 1
    )
    x = x + tensors.get("embedder.positions", np.zeros((length, 1)))[:length]
    for i in range(model["num_layers"]):
        at, sparse = f"layers.{i}", model["pattern"][i % len(model["pattern"])] == "SPARSE"
        for name, apply in (("attention", attend), ("moe", experts) if sparse else ("mlp", feed)):
            before = "attention" if name == "attention" else "mlp"
            y = apply(norm(x, f"{at}.{before}_norm"), f"{at}.{name}")
            x = x + (norm(y, f"{at}.{before}_after_norm") if model["sandwich_norm"] else y)
    x = norm(x, "final_norm")
    z = x @ (tensors["embedder.table"].T if model["tied_output"] else tensors["head.kernel"])
    return z[..., : model["num_ids"]]


if __name__ == "__main__":
    print(logits(*load(sys.argv[1]), [[int(i) for i in sys.argv[2:]]])[0, -1].argsort()[:-6:-1])
