"""Text that a stage's model generates."""

from m6jax import decoding
from m6jax.data.vocab import Vocabulary
from m6jax.experiment.experiment import Sample
from m6jax.experiment.programs import StageProgram
from m6jax.foundation.pytrees import Tree


def continue_prompts(
    program: StageProgram, params: Tree, sample: Sample | None, vocabulary: Vocabulary, seed: int
) -> list[str]:
    """Returns the prompts, each with what the model makes of it.

    A model trained with capacity ONE_X is decoded all the same, dropless.

    Args:
      program: the stage.
      params: parameters in its layout, with router biases (`TrainState.served`).
      sample: prompts and method; None: no prompts.
      vocabulary: of the data.
      seed: of what is drawn.
    """
    if sample is None or not sample.prompts:
        return []
    encoded = [vocabulary.encode(prompt) for prompt in sample.prompts]
    # Rows are spread over the devices like those of a batch.
    filled = encoded + [[]] * (-len(encoded) % program.rows_divisor)
    with program.activate():
        generated = decoding.generate(
            decoding.decoding_model(program.model, force=True),
            params,
            program.layout,
            filled,
            seed=seed,
            method=sample.method,
            max_new_tokens=sample.max_new_tokens,
            eos_id=vocabulary.eos_id,
            pad_id=vocabulary.pad_id,
            start_id=vocabulary.start_id,
        )
    pieces = zip(sample.prompts, encoded, generated.tokens, strict=False)
    return [continued(vocabulary, *piece) for piece in pieces]


def continued(vocabulary: Vocabulary, prompt: str, ids: list[int], new: list[int]) -> str:
    """Returns a prompt with its continuation.

    They are decoded together: alone, the continuation may lose the space that it begins with, or
    bytes of a character that the prompt began.
    """
    before, whole = vocabulary.decode(ids), vocabulary.decode([*ids, *new])
    return prompt + whole.removeprefix(before) if whole.startswith(before) else whole
