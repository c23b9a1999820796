"""Decoding: new tokens after a prompt, keys and values of earlier positions kept in caches.

A prompt is fed as in training, one step behind its targets: patches of a picture if there is one,
the start id, the tokens. The last of them predicts the first new token. Two prompts `a b` and `c`
with the new tokens `d e .` and `f .` (`.` is the end, `0` the start):

    slot      0  1  2  3  4        the last new token is never fed
    row 0     0  a  b  d  e        `prefill` fills 3 slots, each `decode_step` one
    row 1     0  c  f  -  -        2 slots and one more, then the row has ended

A row's slots are its positions, whatever the other rows hold. Padding and rows that have ended
write nothing, are seen by nobody and are not routed.

Experts serve every choice, as if each token were a group of its own: the drops of training depend
on all of a row, which does not exist yet, and do not occur here. So no row depends on another, and
logits are those of the whole-row pass exactly for dense and dropless models; for models trained
with capacity, those of a pass that happened to drop nothing. Models trained with ONE_X are refused
unless forced (`decoding_model`). On a mesh, rows times beams must divide as a batch's rows must.

`cached` is the model with its caches, `methods` how tokens are chosen, `prompts` the features of
prompts, `generating` puts them together.
"""

from m6jax.decoding.cached import DecodingState, decode_step, decoding_model, prefill
from m6jax.decoding.generating import Generated, generate
from m6jax.decoding.methods import Beam, Greedy, Method, Sampling, Task, Texts
from m6jax.decoding.prompts import PROMPT_MULTIPLE, prompt_batch

__all__ = [
    "PROMPT_MULTIPLE",
    "Beam",
    "DecodingState",
    "Generated",
    "Greedy",
    "Method",
    "Sampling",
    "Task",
    "Texts",
    "decode_step",
    "decoding_model",
    "generate",
    "prefill",
    "prompt_batch",
]
