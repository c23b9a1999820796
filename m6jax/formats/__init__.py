"""Models as files that other programs read: safetensors, Hugging Face's folders, StableHLO.

A model leaves as a folder:

    SAFETENSORS    model.safetensors, config.json     m6jax's own names, one leaf for each layer
    HUGGING_FACE   the same two in the names of Mixtral or Llama, and the vocabulary
    STABLEHLO      the files of SAFETENSORS, and model.stablehlo: from them and tokens to logits

Layers that share parameters are written each for itself (delinked), so that a reader needs to know
nothing of sharing. `weights` are the leaves by name, made when they are written; `tensor_files`
writes and reads them; `plain` and `hugging_face` say what they are called; `program` is the third.
"""

from m6jax.formats.settings import Export, Format

__all__ = ["Export", "Format"]
