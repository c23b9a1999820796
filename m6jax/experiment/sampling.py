"""Text that a stage's model writes: prompts in batches of similar lengths, stop strings, JSON.

A text depends on the seed, its prompt and its number alone, not on what else is in its batch.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from m6jax import decoding
from m6jax.data.vocab import Vocabulary
from m6jax.experiment.experiment import Sample
from m6jax.experiment.programs import StageProgram
from m6jax.foundation.pytrees import Tree


@dataclasses.dataclass(frozen=True)
class Written:
    """A text.

    Attributes:
      prompt: its beginning.
      sample: number among the texts of this prompt, from 0.
      text: what follows the prompt.
      whole: both; the prompt as it decodes where it ended inside of a character.
      tokens: number of new ones, the end included.
      log_probability: sum over the new tokens.
      ended: `end` (of the document), `stop` (a stop string), or `length`.
    """

    prompt: str
    sample: int
    text: str
    whole: str
    tokens: int
    log_probability: float
    ended: str


# Shows what a text is so far, with its prompt, and whether that is all.
Show = Callable[[str, bool], None]


def continue_prompts(
    program: StageProgram, params: Tree, sample: Sample | None, vocabulary: Vocabulary, seed: int
) -> list[str]:
    """Returns the prompts, each with what the model makes of it, in order.

    A model trained with capacity ONE_X is decoded all the same, dropless.

    Args:
      program: the stage.
      params: parameters in its layout, with router biases (`TrainState.served`).
      sample: prompts and method; None: no prompts.
      vocabulary: of the data.
      seed: of what is drawn, where the sample has none.
    """
    if sample is None:
        return []
    return [written.whole for written in write_texts(program, params, sample, vocabulary, seed)]


def write_texts(
    program: StageProgram,
    params: Tree,
    sample: Sample,
    vocabulary: Vocabulary,
    seed: int,
    show: Show | None = None,
) -> list[Written]:
    """Returns what the model makes of prompts, `num_samples` texts of each, in order.

    Args:
      program: the stage.
      params: parameters in its layout, with router biases (`TrainState.served`).
      sample: prompts and method.
      vocabulary: of the data.
      seed: of what is drawn, where the sample has none.
      show: is called with every text as it grows, one text after the other.
    """
    seed = seed if sample.seed is None else sample.seed
    encoded = [vocabulary.encode(p) for p in sample.prompts for _ in range(sample.num_samples)]
    written: dict[int, Written] = {}
    for batch in batches(list(map(len, encoded)), 1 if show else sample.batch_size):
        written |= _write_batch(program, params, sample, vocabulary, seed, show, encoded, batch)
    return [written[i] for i in range(len(encoded))]


def batches(lengths: Sequence[int], size: int) -> Iterator[list[int]]:
    """Yields numbers of rows in batches; rows of similar lengths are together.

    >>> list(batches([5, 90, 7, 80], 2))
    [[0, 2], [3, 1]]
    """
    order = list(range(len(lengths)))
    if size > 1:
        order.sort(key=lambda i: lengths[i])
    for first in range(0, len(lengths), size):
        yield order[first : first + size]


def _write_batch(
    program: StageProgram,
    params: Tree,
    sample: Sample,
    vocabulary: Vocabulary,
    seed: int,
    show: Show | None,
    encoded: Sequence[list[int]],
    batch: Sequence[int],
) -> dict[int, Written]:
    """Returns the texts of some rows by number."""
    prompts = [sample.prompts[i // sample.num_samples] for i in batch]
    # Rows are spread over the devices; the last batch has as many as the others.
    rows = min(sample.batch_size, len(encoded)) if show is None else 1
    rows += -rows % program.rows_divisor
    filled = [encoded[i] for i in batch] + [[]] * (rows - len(batch))
    numbers = [*batch, *[len(encoded)] * (rows - len(batch))]

    def whole(row: int, new: Sequence[int]) -> str:
        return continued(vocabulary, prompts[row], filled[row], list(new))

    def stopped(row: int, new: Sequence[int]) -> bool:
        return _stop_at(whole(row, new), len(prompts[row]), sample.stop) is not None

    def watch(tokens: list[list[int]]) -> list[bool]:
        if show is not None:
            show(_certain(whole(0, tokens[0]), len(prompts[0]), sample.stop), False)
        return [row >= len(batch) or stopped(row, new) for row, new in enumerate(tokens)]

    with program.activate():
        generated = decoding.generate(
            decoding.decoding_model(program.model, force=True),
            params,
            program.layout,
            filled,
            seed=seed,
            rows=numbers,
            method=sample.method,
            max_new_tokens=sample.max_new_tokens,
            eos_id=vocabulary.eos_id,
            pad_id=vocabulary.pad_id,
            start_id=vocabulary.start_id,
            watch=watch if show is not None or sample.stop else None,
            watch_every=1 if show is not None else 8,
        )
    found = {}
    for row, number in enumerate(batch):
        new, prompt = generated.tokens[row], prompts[row]
        text = whole(row, new)
        cut = _stop_at(text, len(prompt), sample.stop)
        ended = "end" if new[-1:] == [vocabulary.eos_id] else "length"
        text, ended = (text, ended) if cut is None else (text[:cut], "stop")
        if show is not None:
            show(text, True)
        found[number] = Written(
            prompt=prompt,
            sample=number % sample.num_samples,
            text=text.removeprefix(prompt),
            whole=text,
            tokens=len(new),
            log_probability=generated.log_probabilities[row],
            ended=ended,
        )
    return found


def continued(vocabulary: Vocabulary, prompt: str, ids: list[int], new: list[int]) -> str:
    """Returns a prompt with its continuation.

    They are decoded together: alone, the continuation may lose the space that it begins with, or
    bytes of a character that the prompt began.
    """
    before, whole = vocabulary.decode(ids), vocabulary.decode([*ids, *new])
    return prompt + whole.removeprefix(before) if whole.startswith(before) else whole


def _stop_at(text: str, start: int, stop: Sequence[str]) -> int | None:
    """Returns where the first stop string after the prompt begins; None without one."""
    found = [at for word in stop if (at := text.find(word, start)) >= 0]
    return min(found, default=None)


def _certain(text: str, start: int, stop: Sequence[str]) -> str:
    """Returns what of a growing text will stay: no half character, and no beginning of a stop."""
    text = text.rstrip("\N{REPLACEMENT CHARACTER}")
    cut = _stop_at(text, start, stop)
    if cut is not None:
        return text[:cut]
    held = [n for word in stop for n in range(1, len(word)) if text.endswith(word[:n])]
    return text[: len(text) - max(held, default=0)]
