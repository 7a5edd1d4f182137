"""What a wait for a transfer that was not submitted in time says that it waits for."""

from __future__ import annotations

from .movement import Movement


def not_submitted(movement: Movement, timeout_s: float | None, layer: int | None) -> TimeoutError:
    """``layer``: the one that was waited for, None: all."""
    what = "a layer" if layer is None else f"layer {layer}"
    return TimeoutError(f"{what} was not submitted within timeout_s = {timeout_s}; {_what_is_missing(movement, layer)}")


def _what_is_missing(movement: Movement, layer: int | None) -> str:
    plan = movement.plan
    asked = range(plan.num_layers) if layer is None else plan.layers_of(plan.group_of(layer))
    unmarked = [one for one in asked if one in movement.unmarked]
    if unmarked and movement.layerwise:
        return f"mark_layer_written was not called for {_text_of(unmarked)}"
    if unmarked:
        return f"mark_layer_read was not called for {_text_of([one - movement.ring for one in unmarked])}"
    if movement.unread:
        return "it is still being read into host memory"
    return f"it waits for {_what_is_not_marked(movement)} of the same blocks, of which layers are not marked"


def _what_is_not_marked(movement: Movement) -> str:
    loads = [one for one in list(movement.depends_on) if one.unmarked and one.direction == "onload"]
    return "a load into the same layer buffers" if loads else "a layerwise offload"


def _text_of(layers: list[int]) -> str:
    """``layer 3``, or ``layers 3, 4 and 12 more``."""
    shown = layers if len(layers) <= 4 else layers[:3]
    rest = f" and {len(layers) - len(shown)} more" if len(shown) < len(layers) else ""
    return f"{'layer' if len(layers) == 1 else 'layers'} {', '.join(map(str, shown))}{rest}"
