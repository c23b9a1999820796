"""The training step layer by layer, for weights that rest on the host.

The ordinary step makes all gradients, then all updates; for weights on the host the gradients would
need as much host memory again. Here the backward pass updates a layer as soon as its gradient is
there, and writes it back in place:

    forward    for use in 0 ... L-1:     copy the next layer to the device; x = layer(x); keep x
    head       loss, and its gradients by x, by the head and by what the layers report
    backward   for use in L-1 ... 0:     copy the next layer to the device; gradients of this layer
                                         from its kept input; update it; write it back
    rest       update what is outside of the stack

With U = L no gradient of the whole stack ever exists, and what moves between host and device is
three times the offloaded weights: read, read, write (and one layer more, which the last copy of the
backward pass fetches in vain). With U < L the gradients of the unit add up on the device over its
repeats, and a layer is updated at its last use.

A batch in parts (`Update.microbatches`) goes through the layers once, too, and inside of a layer
part by part, forward and back; the layer's gradient adds up in float32 on the device, and what
moves between host and device stays the same. Numerically it is `train_step`: the same loss and
the same new parameters, to rounding.
"""

from m6jax.training.streaming.step import check_update, streamed_step

__all__ = ["check_update", "streamed_step"]
